"""Standard input, which is closed to libraries, so that none waits for an answer, and opened for a conversation."""

import contextlib
import os
from pathlib import Path

_users: list[int] = []
"""A descriptor of the user's standard input, which no child process inherits."""


def close() -> None:
    """Let everything read nothing from standard input."""
    with contextlib.suppress(OSError):  # it may be closed already
        _users.append(os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)


def reopen() -> None:
    """Let this process read what the user types or pipes in."""
    if _users:
        os.dup2(_users.pop(), 0)
