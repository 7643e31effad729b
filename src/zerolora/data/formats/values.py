"""Checks of a row's values: each returns the value, or raises BadRow with the name, the value and what to write."""

import json
import operator
from collections.abc import Iterator
from typing import Any

from zerolora.data.example import BadRow
from zerolora.errors import shown

MEDIA = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "images"),
    **dict.fromkeys(("video", "videos", "video_url"), "videos"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "audio"),
}
"""What a column or a part of a message of this name or type holds, beside text."""


def media_of(kind: str, name: str) -> BadRow:
    """Return the error of a column, or a part of a message, that holds no text; `kind` is of MEDIA."""
    return BadRow(
        f"{name} holds {MEDIA[kind]}, which are not supported: only text can be trained on, of a vision-language model "
        "too; leave it out of the row, or write bad_row: drop to leave out such rows"
    )


def list_of(value: Any, name: str) -> list[Any]:
    """Return a list, which may be given as JSON text, as in a cell of CSV."""
    found = json_of(value, name) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(found, list):
        raise BadRow(f"{name} is {shown(value)}; write a list")
    return found


def json_of(value: Any, name: str) -> Any:
    """Parse a JSON text; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is {shown(value)}, which is not JSON ({error}); correct it") from None


def numbers_of(value: Any, name: str) -> list[int]:
    found, numbers = list_of(value, name), []
    if set(map(type, found)) <= {int}:
        return found
    for place, item in enumerate(found):
        try:
            if isinstance(item, bool):
                raise TypeError
            numbers.append(operator.index(item))
        except TypeError:
            raise BadRow(f"{name}[{place}] is {shown(item)}; write a token number") from None
    return numbers


def text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is missing; write a text" if value is None else f"{name} is {shown(value)}; write a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{name} holds half a character ({shown(value[error.start])}, at {error.start + 1}), "
            "which UTF-8 cannot hold; remove it"
        ) from None
    return value


def filled(text: str, name: str) -> str:
    if not text.strip():
        raise BadRow(f"{name} is empty; fill it in or remove the row")
    return text


def encodable(value: Any, name: str) -> Any:
    """Return a nested value after checking that all texts in it can be encoded."""
    for path, text in _texts(value, name):
        text_of(text, path)
    return value


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield f"a key of {name}", key
            yield from _texts(held, f"{name}.{shown(key)[1:-1]}")
    elif isinstance(value, list):
        for number, held in enumerate(value):
            yield from _texts(held, f"{name}[{number}]")


def objects_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return a list of objects, without the keys that Arrow fills with null where another row has them."""
    found = list_of(value, name)
    for number, item in enumerate(found):
        if not isinstance(item, dict):
            raise BadRow(f"{name}[{number}] is {shown(item)}; write an object")
    return [_without_nulls(item) for item in found]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [_without_nulls(held) for held in value]
    return value
