"""The one exception whose message is meant for a user."""

from typing import Any

LONGEST = 60


class UserError(Exception):
    """A mistake the user can mend: the message names the file, the key or line, the value and the remedy.

    Commands print it without a traceback and exit with code 2. It may hold several lines, one a mistake.
    """


def shown(value: Any) -> str:
    """Return a value as a user wrote it, cut so that one line stays one line."""
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
