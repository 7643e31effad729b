"""Checks of a row's values: each returns the value, or raises BadRow with its name, the value and what to use."""

import operator
from collections.abc import Iterator
from math import isnan
from typing import Any

from zerolora.data.example import BadRow
from zerolora.data.records import STRICT, TwiceError, WrittenObject
from zerolora.errors import shown

INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))


def list_of(value: Any, name: str) -> list[Any]:
    """Return a list, maybe from JSON text, as in a cell of CSV."""
    result = json_of(value, name) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(result, list):
        raise BadRow(f"{name} is {shown(value)}; use a list")
    return result


def json_of(value: Any, name: str) -> Any:
    """Parse a JSON text; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return STRICT.decode(value)
    except TwiceError as error:
        raise BadRow(f"{name} {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is {shown(value)}, which is not JSON ({error}); correct it") from None


def numbers_of(value: Any, name: str) -> list[int]:
    result, numbers = list_of(value, name), []
    if set(map(type, result)) <= {int}:
        return result
    for position, item in enumerate(result):
        try:
            if isinstance(item, bool):
                raise TypeError
            numbers.append(operator.index(item))
        except TypeError:
            raise BadRow(f"{name}[{position}] is {shown(item)}; use a token number") from None
    return numbers


def text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is missing; add a text" if value is None else f"{name} is {shown(value)}; use a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{name} contains half a character ({shown(value[error.start])}, at {error.start + 1}), "
            "which UTF-8 cannot encode; remove it"
        ) from None
    return value


def filled(text: str, name: str) -> str:
    if not (stripped := text.strip()) or (ord(stripped[0]) in INVISIBLE and not visible(text).strip()):
        raise BadRow(f"{name} is empty; fill it in or remove the row")
    return text


def visible(text: str) -> str:
    """Return a text without zero-width spaces, word joiners and byte order marks, which `strip` does not remove."""
    return text if text.isascii() else text.translate(INVISIBLE)


def encodable(value: Any, name: str) -> Any:
    """Return a nested value if JSON has a form for it; a table may contain dates and bytes."""
    for path, leaf in _leaves(value, name):
        if isinstance(leaf, str):
            text_of(leaf, path)
        elif leaf is not None and not isinstance(leaf, (int, float)):
            raise BadRow(f"{path} is {shown(leaf)}, which JSON has no form for; write it as text")
    return value


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, held in value.items():
            yield f"a key of {name}", key
            yield from _leaves(held, f"{name}.{shown(key)[1:-1]}")
    elif isinstance(value, list):
        for number, held in enumerate(value):
            yield from _leaves(held, f"{name}[{number}]")
    else:
        yield name, value


def objects_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, maybe from JSON text."""
    result = list_of(value, name)
    for number, item in enumerate(result):
        if not isinstance(item, dict):
            raise BadRow(f"{name}[{number}] is {shown(item)}; use an object")
    return result


def without_nulls(value: Any) -> Any:
    """Return a nested value without the keys that are null, which a table fills in where another row has a value; not
    in a WrittenObject."""
    if isinstance(value, WrittenObject):
        return value
    if isinstance(value, dict):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [without_nulls(held) for held in value]
    return value


def is_blank(value: Any) -> bool:
    """Return whether a value is null, a blank text, or an empty list or object, also as JSON."""
    if isinstance(value, str):
        if value[:1].isalnum():  # true for most texts
            return False
        text = value.strip()
        return len(text) < 3 and text in ("", "[]", "{}")
    if isinstance(value, (list, dict)):
        return not value
    return value is None or (isinstance(value, float) and isnan(value))


def factor_of(value: Any) -> float | None:
    """Return a number, or true and false as 1 and 0, maybe from text; None for any other value."""
    if isinstance(value, str):
        value = {"true": 1, "false": 0}.get(value.strip().lower(), value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
