"""Files that an imported config names."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LARGEST_FILE = 16 * 2**20  # bytes of a file of settings


def exists(path: Path, check: Callable[[Path], bool]) -> bool:
    """Return what `check` says of a path, False if no file can have that name."""
    with suppress(OSError, ValueError):  # a name that is too long, or has a null character
        return check(path)
    return False
