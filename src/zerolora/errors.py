"""Error messages for users."""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

from zerolora.workflow_files import IS_PACKAGED, ROOT

LONGEST = 60  # characters of a value in a message
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Matches characters that a terminal obeys: control characters, and those that break or turn a line."""

REMEDIES = {
    errno.ENOSPC: "free some space there, or write to another disk",
    errno.EDQUOT: "free some of your quota there, or write to another disk",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or write to another file system",
    errno.EROFS: "write to a directory that is writable",
    errno.EACCES: "change its permissions, or write to another directory",
    errno.EPERM: "change its permissions, or write to another directory",
    errno.ENOLCK: "its file system has no locks; move it to one that has, or mount it with locks",
    errno.EISDIR: "give the path of a file",
    errno.ENOTDIR: "give a path that leads through directories only",
    errno.ENOENT: "correct the path, or bring the file back",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "remove that link",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.EIO: "the disk or its server failed; look at the system's log, then run it again",
    errno.ESTALE: "the file system's server went away; run it again",
}


class UserError(Exception):
    """An error that the user can fix: the message has the file, the key or line, the value and the remedy.

    Commands print it without a traceback and exit with code 2. It may have several lines, one for each mistake.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable_lines(message))


def install_command(requirement: str) -> str:
    """Return, for a message, what installs a library for this Python: pip, or `make` in a checkout, which installs all
    into the .venv there."""
    if IS_PACKAGED:
        return f"`{sys.executable} -m pip install {requirement}`"
    make = "make" if Path.cwd() == ROOT else f"make -C {ROOT}"
    installing = f"`{make}`, which installs envs/requirements.lock"
    commands = ROOT / ".venv/bin"
    if Path(sys.prefix).resolve() == commands.parent.resolve():
        return installing
    return f"{installing} in .venv, and then the commands in {commands}: this is {sys.executable}"


def printable(text: str) -> str:
    """Return a line with control characters escaped, so that a terminal does not interpret them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` returns it."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shown(value: Any) -> str:
    """Return a value for a message, shortened to fit in one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits, deeply nested values
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


EXPECTED = (UserError, OSError, MemoryError)
"""Errors that every process reports in one line (`message_of`) and exit code 2; others are faults of this package."""


def message_of(error: BaseException) -> str:
    """Return the line of an EXPECTED error."""
    if isinstance(error, OSError):
        return explained(error)
    if isinstance(error, MemoryError):
        reason = f" ({' '.join(str(error).split())})" if str(error) else ""
        return f"not enough memory{reason}; give the job more, or raise its limit (`ulimit -v`)"
    return str(error)


def explained(error: OSError) -> str:
    """Return one line for an error of the operating system: the file, the reason, the remedy."""
    number = error.errno or 0
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    if error.filename is None:
        return f"{reason}; {REMEDIES.get(number, 'see the log for what was done last, and run it again')}"
    path = Path(os.fsdecode(error.filename))
    name = str(path).encode("utf-8", "backslashreplace").decode()
    if number == errno.ENOENT and path.is_symlink():
        return f"{name}: is a link to {str(path.readlink())!r}, which does not exist; correct or remove the link"
    return f"{name}: {reason}; {REMEDIES.get(number, 'look at that file, and run it again')}"
