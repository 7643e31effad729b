"""Errors whose message is meant for a user."""

import errno
import os
from pathlib import Path
from typing import Any

LONGEST = 60  # characters of a value that a message shows

REMEDIES = {
    errno.ENOSPC: "free some space there, or write to another disk",
    errno.EDQUOT: "free some of your quota there, or write to another disk",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or write to another file system",
    errno.EROFS: "write to a place that is not read-only",
    errno.EACCES: "give yourself the permission, or write to another place",
    errno.EPERM: "give yourself the permission, or write to another place",
    errno.ENOLCK: "its file system has no locks; move it to one that has, or mount it with locks",
    errno.EISDIR: "write the path of a file",
    errno.ENOTDIR: "write a path that leads through directories only",
    errno.ENOENT: "correct the path, or bring the file back",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "remove that link",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.EIO: "the disk or its server failed; look at the system's log, then run it again",
    errno.ESTALE: "the file system's server went away; run it again",
}


class UserError(Exception):
    """A mistake that the user can correct: the message names the file, the key or line, the value and the remedy.

    Commands print it without a traceback and exit with code 2. It may hold several lines, one for each mistake.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(printable(line) for line in message.split("\n")))


def wording(text: str) -> str:
    """Return a text that is only ever shown to the user. What is written out in a call of this function is no part of a
    code fingerprint (config/fingerprint.py), so nothing may compute with it."""
    return text


def wordings(**texts: str) -> dict[str, str]:
    """Return a table of such texts by name; the names are part of a fingerprint."""
    return texts


def printable(text: str) -> str:
    """Return a line with control characters, which a terminal would obey, escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def shown(value: Any) -> str:
    """Return a value as a user wrote it, cut so that one line stays one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits, values nested too deep
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def explained(error: OSError) -> str:
    """Return one line for what the operating system refused: the file, the reason, the remedy."""
    number = error.errno or 0
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    if error.filename is None:
        return f"{reason}; {REMEDIES.get(number, 'see the log for what was done last, and run it again')}"
    path = Path(os.fsdecode(error.filename))
    name = str(path).encode("utf-8", "backslashreplace").decode()
    if number == errno.ENOENT and path.is_symlink():
        return f"{name}: is a link to {str(path.readlink())!r}, which does not exist; correct or remove the link"
    return f"{name}: {reason}; {REMEDIES.get(number, 'look at that file, and run it again')}"
