"""Reads the values of a JSON file of another tool."""

import json
import math
from pathlib import Path
from typing import Any

from zerolora.config.file import DEEPEST
from zerolora.errors import UserError, shown

LARGEST_FILE = 16 * 2**20
"""Bytes of a file of settings: far more than one needs, and read in a second."""


def json_values(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises UserError, naming the line, if it cannot be read, is no object, names a key twice, or has a number that is
    not finite or more than 50 levels.
    """
    value = json_value(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {shown(value)} where an object is expected; correct the file")
    return value


def json_value(path: Path) -> Any:
    """Return the value in a JSON file, with the checks of `json_values`."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path}: has more than {LARGEST_FILE:,} bytes; name a file of settings")
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_float)
        _check_depth(value)
        json.dumps(value, ensure_ascii=False).encode()  # half a character, as in "\ud800", is in no file
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: is not JSON ({error.msg}); correct it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deep; write at most {DEEPEST} levels") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a file that can be read") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; correct it") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{shown(twice)} is given twice in an object")
    return values


def _finite(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is too large a number")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise RecursionError


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
