"""Reads a JSON file of any origin: bounded, whole, and only if it can mean one thing.

What a key holds is checked by the kinds of json_kinds.py; which keys a file has, by model/foreign.py.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown

LARGEST = 1 << 30
"""Bytes of a JSON file that a stage wrote: those of answers.json grow with the rows."""
DEEPEST = 50
"""Levels of lists and objects in a file."""
LONGEST_NUMBER = 400
"""Digits of a number; a double has 309 before its point."""


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file. A pipe, which could hang, or a device is refused.

    Raises UserError, which names the file, for these, a directory, and a file of more than `largest` bytes, OSError for
    one that is missing or unreadable.
    """
    # Opening a pipe waits for its writer unless O_NONBLOCK is set.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            what = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
            raise UserError(f"{path}: is {what}; a file is expected")
        if found.st_size > largest:
            raise UserError(f"{path}: has {found.st_size:,} bytes, too many for such a file; at most {largest:,}")
        parts = []
        # A file may grow, and those of /proc have no size.
        while part := os.read(file, largest + 1):
            parts.append(part)
            largest -= len(part)
            if largest < 0:
                raise UserError(f"{path}: is too long for such a file, or grows while it is read")
        return b"".join(parts)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(file)


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text of a regular UTF-8 file, with its own line ends. Raises as `read_bytes`, UserError for another
    encoding."""
    return decoded(path, read_bytes(path, largest))


def decoded(path: Path, content: bytes) -> str:
    """Return the UTF-8 text of bytes of file `path`. Raises UserError if they are none, or begin with a byte order
    mark."""
    if content[:3] == b"\xef\xbb\xbf":
        raise UserError(f"{path}: begins with a byte order mark; save the file as UTF-8 without one")
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}: is UTF-16; save the file as UTF-8")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def read_own(path: Path, written_by: str) -> Any:
    """Return the JSON value in a file that the command `written_by` writes.

    Raises UserError if the file is missing or broken, or two keys of an object are equal.
    """
    try:
        text = read_text(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: there is no such file; `{written_by}` writes it") from None
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it and run `{written_by}` again") from None


def read_foreign(path: Path, remedy: str, largest: int, *, infinite: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file that another program wrote.

    Numbers are finite and have at most LONGEST_NUMBER digits; Infinity is read if `infinite`, as Python writes it.
    Raises UserError, which ends with `remedy`, if the file is missing, is of more than `largest` bytes or DEEPEST
    levels, holds anything but an object, or could be read in two ways: with equal keys, or half a character.
    """
    try:
        text = read_text(path, largest)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: there is no such file; {remedy}") from None
    return parsed(path, text, remedy, infinite=infinite)


def parsed(path: Path, text: str, remedy: str, *, infinite: bool = False) -> dict[str, Any]:
    """Return the JSON object that the text of file `path` is, as `read_foreign` does."""
    number = _number(infinite)
    try:
        value = json.loads(text, parse_constant=number, parse_float=number, parse_int=_short, object_pairs_hook=_unique)
        check_depth(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}; {remedy}") from None
    except UnicodeEncodeError as error:
        half = shown(error.object[error.start])
        raise UserError(f"{path}: {half} is half a character; write the whole one, or {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deep; at most {DEEPEST} levels are read; {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {shown(value)}; expected a JSON object; {remedy}")
    return value


def check_depth(value: Any, deepest: int = DEEPEST) -> None:
    """Raise RecursionError if a value has more levels of lists and objects."""
    level = [value]
    for _ in range(deepest + 1):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise RecursionError


def is_unreadable(error: OSError) -> bool:
    """Tell whether a file is there, but cannot be read."""
    return error.errno not in (errno.ENOENT, errno.ENOTDIR)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"the key {shown(repeated(key for key, _ in pairs))} is there twice")
    return value


def repeated(keys: Iterable[str]) -> str:
    """Return the first key that was there before; one of them must have been."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is there twice")


def _number(infinite: bool) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) and not (infinite and math.isinf(value)):
            raise ValueError(f"{shown(text)} is not valid; expected a finite number")
        return value

    return number


def _short(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"{shown(text)} is not valid; expected a number of at most {LONGEST_NUMBER} digits")
    return int(text)
