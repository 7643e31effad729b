"""Kinds of JSON values: what a key of a file may hold, and the words for it in a message."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from zerolora.errors import UserError, shown

Fault: TypeAlias = tuple[tuple[str, ...], str, str]
"""Where a value is, what is wrong with it, and what is expected there."""


@dataclass(frozen=True)
class JsonKind:
    """A kind of values."""

    words: str
    """What is expected, for messages."""
    fault: Callable[[Any], Fault | None]
    """Returns the first thing that is wrong with a value."""

    def __or__(self, other: "JsonKind") -> "JsonKind":
        """Return the kind of what is of one or the other: the message is of the kind that got further inside."""

        def fault(value: Any) -> Fault | None:
            one = self.fault(value)
            two = one and other.fault(value)
            if one is None or two is None:
                return None
            return next((each for each in (one, two) if each[0]), ((), f"is {shown(value)}", words))

        words = f"{self.words} or {other.words}"
        return JsonKind(words, fault)

    def __and__(self, other: "JsonKind") -> "JsonKind":
        """Return the kind of what is of both."""
        return JsonKind(self.words, lambda value: self.fault(value) or other.fault(value))


def check(value: Any, kind: JsonKind, path: Path, remedy: str) -> None:
    """Raise UserError, which names the file, the key and the value, and ends with `remedy`, unless a value is of a
    kind."""
    if (fault := kind.fault(value)) is not None:
        where, wrong, words = fault
        key = ".".join(shown(each)[1:-1] for each in where)
        raise UserError(f"{path}: {key}{' ' if key else ''}{wrong}; expected {words}; {remedy}")


def plain(words: str, fits: Callable[[Any], bool]) -> JsonKind:
    """Return the kind of values that a function accepts."""
    return JsonKind(words, lambda value: None if fits(value) else ((), f"is {shown(value)}", words))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TEXT = plain("a text", lambda value: isinstance(value, str))
FLAG = plain("true or false", lambda value: isinstance(value, bool))
NULL = plain("null", lambda value: value is None)
OBJECT = plain("an object", lambda value: isinstance(value, dict))
LIST = plain("a list", lambda value: isinstance(value, list))
WHOLE = plain("a whole number", lambda value: _whole(value) and abs(value) < 2**63)
COUNT = plain("a whole number, 0 or more", lambda value: _whole(value) and 0 <= value < 2**63)
POSITIVE = plain("a whole number, 1 or more", lambda value: _whole(value) and 1 <= value < 2**31)
NUMBER = plain("a finite number", lambda value: _whole(value) or (isinstance(value, float) and math.isfinite(value)))
FILE_NAME = plain(
    "the name of a file beside it",
    lambda value: isinstance(value, str) and value not in ("", ".", "..") and not set(value) & {"/", "\\", "\0"},
)


def _below(value: Any) -> bool:
    return (
        isinstance(value, str)
        and not value.startswith("/")
        and "\0" not in value
        and not {"", ".", ".."} & set(value.split("/"))
    )


PATH_BELOW = plain("the relative path of a file below it", _below)


def list_of(kind: JsonKind) -> JsonKind:
    """Return the kind of lists of a kind."""

    def fault(value: Any) -> Fault | None:
        if not isinstance(value, list):
            return (), f"is {shown(value)}", words
        for number, each in enumerate(value):
            if result := kind.fault(each):
                return _inside(str(number), result)
        return None

    words = f"a list, of {kind.words} each"
    return JsonKind(words, fault)


def map_of(kind: JsonKind, key: JsonKind = TEXT, but: Mapping[str, JsonKind] | None = None) -> JsonKind:
    """Return the kind of objects with any keys of kind `key`, whose values are of `kind`; those of the keys in `but`
    are of other kinds."""
    others = but or {}

    def fault(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return (), f"is {shown(value)}", words
        for name, each in value.items():
            if result := key.fault(name):
                return (), f"has a key that {result[1]}", result[2]
            if result := others.get(name, kind).fault(each):
                return _inside(name, result)
        return None

    words = f"an object, with {kind.words} for each key"
    return JsonKind(words, fault)


def record(optional: Mapping[str, JsonKind], required: Mapping[str, JsonKind] | None = None) -> JsonKind:
    """Return the kind of objects with these keys; others are not looked at."""
    needed = required or {}
    known = {**optional, **needed}

    def fault(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return (), f"is {shown(value)}", words
        for name, kind in needed.items():
            if name not in value:
                return (name,), "is missing", kind.words
        for name, each in value.items():
            if name in known and (result := known[name].fault(each)):
                return _inside(name, result)
        return None

    words = f"an object with {', '.join(needed)}" if needed else "an object"
    return JsonKind(words, fault)


def _inside(name: str, fault: Fault) -> Fault:
    where, wrong, words = fault
    return (name, *where), wrong, words


def nullable(kinds: Mapping[str, JsonKind]) -> dict[str, JsonKind]:
    """Return the kinds of keys that may hold null as well."""
    return {name: kind | NULL for name, kind in kinds.items()}
