"""Reads JSON files from untrusted sources, bounded and unambiguous; json_kinds.py checks the types of their values."""

import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zerolora.errors import CONTROLS, UserError, shown

LARGEST = 1 << 30
"""Bytes of a file that a stage wrote; answers.json grows with the rows."""
DEEPEST = 50
"""Nested lists and objects."""
LONGEST_NUMBER = 400
"""Digits of an integer; the largest double has 309."""


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a regular file.

    Raises UserError, naming the file, for a pipe (which could hang), device or directory, and for more than `largest`
    bytes; OSError if it is missing or unreadable.
    """
    # Opening a pipe waits for its writer unless O_NONBLOCK is set.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        result = os.fstat(file)
        if not stat.S_ISREG(result.st_mode):
            what = "a directory" if stat.S_ISDIR(result.st_mode) else "a pipe or a device"
            raise UserError(f"{path}: is {what}; a file is expected")
        if result.st_size > largest:
            raise UserError(f"{path}: has {result.st_size:,} bytes, too many for such a file; at most {largest:,}")
        parts = []
        # A file may grow, and files in /proc have size 0.
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
    """Return the text of a regular UTF-8 file, with its line endings. Raises as `read_bytes`, and UserError for another
    encoding."""
    return decoded(path, read_bytes(path, largest))


def decoded(path: Path, content: bytes) -> str:
    """Return bytes of file `path` as text. Raises UserError if they are not UTF-8 or begin with a byte order mark."""
    if content[:3] == b"\xef\xbb\xbf":
        raise UserError(f"{path}: begins with a byte order mark; save the file as UTF-8 without one")
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}: is UTF-16; save the file as UTF-8")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def read_foreign(path: Path, remedy: str, largest: int, *, infinite: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of another program.

    Numbers are finite, except Infinity if `infinite`, and have at most LONGEST_NUMBER digits. Raises UserError, ending
    with `remedy`, if the file is missing, exceeds `largest` bytes or DEEPEST levels, is not an object, or is ambiguous:
    with repeated keys, or unpaired surrogates.
    """
    try:
        text = read_text(path, largest)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: there is no such file; {remedy}") from None
    return parsed(path, text, remedy, infinite=infinite)


def parsed(path: Path, text: str, remedy: str, *, infinite: bool = False) -> dict[str, Any]:
    """Return the JSON object in the text of file `path`, as `read_foreign` does."""
    number = _number(infinite)
    try:
        value = json.loads(text, parse_constant=number, parse_float=number, parse_int=_short, object_pairs_hook=_named)
        _check_depth(value)
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


def _check_depth(value: Any) -> None:
    """Raise RecursionError if a value has more than DEEPEST levels of lists and objects."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            part
            for each in level
            if isinstance(each, dict | list)
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise RecursionError


WHITE_SPACE = dict.fromkeys(map(ord, "\t\n\r"))
"""In words that some tokenizers add, which added_tokens.json has as keys."""


def _named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as `unique` does. Raises ValueError too for a key with control characters: libraries print the
    keys that they do not know."""
    for key, _ in pairs:
        if CONTROLS.search(key.translate(WHITE_SPACE)):
            raise ValueError(f"the key {shown(key)} has control characters")
    return unique(pairs)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError for a repeated key."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"the key {shown(repeated(key for key, _ in pairs))} is there twice")
    return value


def repeated(keys: Iterable[str]) -> str:
    """Return the first repeated key; there must be one."""
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
