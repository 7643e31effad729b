"""Types of JSON values, as pydantic checks them, and the line of an error: file, key, value seen, expected type.

A class for each kind of object, derived from JsonObject, defines the keys that this project reads (model/foreign.py).
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Predicate
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from zerolora.errors import UserError, shown

EXPECTED = "expected"
"""The type of an error whose message is the type expected."""
CONTAINERS = {
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "too_short": "{min_length} or more entries",
    "too_long": "{max_length} or fewer entries",
}
"""What is expected where pydantic raises an error of its own."""


@dataclass(frozen=True)
class Expected:
    """Describes a type in messages."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), EXPECTED, custom_error_message=self.words)


def _is_file_name(value: str) -> bool:
    return value not in ("", ".", "..") and not set(value) & {"/", "\\", "\0"}


def is_below(value: str) -> bool:
    """Return whether a text is a relative path without `.` and `..`."""
    return not value.startswith("/") and "\0" not in value and not {"", ".", ".."} & set(value.split("/"))


Null = Annotated[None, Expected("null")]
Text = Annotated[str, Expected("a text")]
Flag = Annotated[bool, Expected("true or false")]
Whole = Annotated[int, Field(gt=-(2**63), lt=2**63), Expected("a whole number")]
Count = Annotated[int, Field(ge=0, lt=2**63), Expected("a whole number, 0 or more")]
Positive = Annotated[int, Field(ge=1, lt=2**31), Expected("a whole number, 1 or more")]
Number = Annotated[float, Field(allow_inf_nan=False), Expected("a finite number")]
FileName = Annotated[str, Predicate(_is_file_name), Expected("the name of a file beside it")]
PathBelow = Annotated[str, Predicate(is_below), Expected("the relative path of a file below it")]


class JsonObject(BaseModel):
    """An object of which some keys are checked; others are ignored. Its validator is built when first used."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True, protected_namespaces=())


def check(value: Any, kind: Any, path: Path, remedy: str) -> None:
    """Raise UserError with file, key, value and `remedy` unless a value is of a type, e.g. list[Text]."""
    try:
        _validator(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{path}: {_described(value, error)}; {remedy}") from None


@functools.cache
def _validator(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _described(value: Any, error: ValidationError) -> str:
    """Return key, value and expected type of the first mistake, in a union that of the alternative that fits best."""
    mistakes = [(_location(value, mistake), mistake) for mistake in error.errors(include_url=False)]
    first = mistakes[0][0][:1]
    where, mistake = max((each for each in mistakes if each[0][:1] == first), key=lambda each: len(each[0]))
    key = ".".join(shown(part)[1:-1] for part in where)
    if mistake["type"] == "missing":
        return f"{key} is missing"
    here = f"{key} has a key that is" if mistake["loc"][-1:] == ("[key]",) else f"{key} is".strip()
    expected = dict.fromkeys(_words(other) for location, other in mistakes if location == where)
    return f"{here} {shown(mistake['input'])}; expected {' or '.join(expected)}"


def _location(value: Any, mistake: ErrorDetails) -> tuple[str, ...]:
    """Return the keys and indices of a mistake, without the names of a union's alternatives."""
    result = []
    for part in mistake["loc"]:
        if _has(value, part):
            value = value[part]
        elif mistake["type"] != "missing" or part != mistake["loc"][-1]:
            continue
        result.append(str(part))
    # A mistake in a key is one of the object that has it.
    return tuple(result[:-1] if mistake["loc"][-1:] == ("[key]",) else result)


def _has(value: Any, part: str | int) -> bool:
    return part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)


def _words(mistake: ErrorDetails) -> str:
    if words := CONTAINERS.get(mistake["type"]):
        return words.format(**mistake.get("ctx", {}))
    return mistake["msg"]
