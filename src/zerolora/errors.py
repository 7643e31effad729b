"""The one exception whose message is meant for a user."""


class UserError(Exception):
    """A mistake the user can mend: the message names the file, the key or line, the value and the remedy.

    Commands print it without a traceback and exit with code 2. It may hold several lines, one a mistake.
    """
