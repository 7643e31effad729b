"""The compared form of settings, without keys at their neutral value.

    python -m zerolora.config.compared    # update neutral.json after adding a key

Both engines compare a stage's settings by value, and a resumed run compares its own. A new key must therefore be absent
while at its default, and a changed default must show. The neutral value of a key is its first default (neutral.json): a
key is left out only while its value, its default and its neutral value are equal.
"""

import functools
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from zerolora.config.section import AlwaysCompared
from zerolora.files import as_json

FILE = Path(__file__).with_name("neutral.json")


class Key(NamedTuple):
    """A field of a section."""

    name: str
    always: bool
    """Whether it is never left out: it is required, marked AlwaysCompared, or a discriminator."""
    default: Any
    """The default as JSON."""
    neutral: Any
    """The neutral value as JSON."""


def compared(settings: BaseModel) -> dict[str, Any]:
    """Return settings as JSON without the keys at their neutral value; the settings' class fills them in again."""
    return _compared(settings, settings.model_dump(mode="json"))


def filled(section: type[BaseModel], values: dict[str, Any]) -> dict[str, Any]:
    """Return the compared form of a section, of this or an earlier version, with its neutral values filled in. Unknown
    keys are unchanged."""
    omitted = {key.name: key.neutral for key in _keys(section) if not key.always}
    fields = section.model_fields
    return {
        name: _filled(fields[name].annotation, value) if name in fields else value
        for name, value in (omitted | values).items()
    }


def _filled(annotation: Any, value: Any) -> Any:
    """Return the value of a field with the neutral values of its sections filled in."""
    inner = get_args(annotation)
    match get_origin(annotation), value:
        case None, dict() if _is_section(annotation):
            return filled(annotation, value)
        case origin, list() if origin is list:
            return [_filled(inner[0], each) for each in value]
        case origin, dict() if origin is dict:
            return {name: _filled(inner[1], each) for name, each in value.items()}
        case origin, _ if origin in (Union, UnionType):
            sections = [each for each in inner if _is_section(each)]
            return _filled(sections[0], value) if len(sections) == 1 else value
    return value


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _compared(settings: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in _keys(type(settings)):
        value = getattr(settings, key.name)
        dumped, is_section = _nested(value, values[key.name])
        neutral = dumped == {} and key.default == {} if is_section else dumped == key.default == key.neutral
        if key.always or not neutral:
            result[key.name] = dumped
    return result


def _nested(value: Any, dumped: Any) -> tuple[Any, bool]:
    """Return a value as JSON, with its sections in compared form, and whether it is a section itself."""
    match value:
        case BaseModel():
            return _compared(value, dumped), True
        case [BaseModel(), *_]:
            return [_compared(each, inner) for each, inner in zip(value, dumped, strict=True)], False
        case dict() if any(isinstance(each, BaseModel) for each in value.values()):
            return {name: _nested(each, dumped[name])[0] for name, each in value.items()}, False
    return dumped, False


@functools.cache
def _keys(section: type[BaseModel]) -> tuple[Key, ...]:
    neutral = _neutral()
    result = []
    for name, field in section.model_fields.items():
        marked = any(isinstance(each, AlwaysCompared) for each in field.metadata)
        if field.is_required() or marked or _names_class(field.annotation):
            result.append(Key(name, True, None, None))
            continue
        value = field.get_default(call_default_factory=True)
        default = _nested(value, to_jsonable_python(value))[0]
        result.append(Key(name, False, default, neutral.get(_owner(section, name), {}).get(name, default)))
    return tuple(result)


def _names_class(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def _owner(section: type[BaseModel], name: str) -> str:
    """Return the name of the class that declares a field."""
    return next(each.__name__ for each in section.__mro__ if name in inspect.get_annotations(each))


@functools.cache
def _neutral() -> dict[str, dict[str, Any]]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def neutral_values() -> dict[str, dict[str, Any]]:
    """Return neutral.json with the default of each missing key."""
    from zerolora.config.settings import Resolved, TrainingChoice

    result = {name: dict(values) for name, values in _neutral().items()}
    for section in (*_sections(Resolved), *_sections(TrainingChoice)):
        for key in _keys(section):
            value = section.model_fields[key.name].get_default(call_default_factory=True)
            if not key.always and not isinstance(value, BaseModel):
                result.setdefault(_owner(section, key.name), {}).setdefault(key.name, key.default)
    return {name: dict(sorted(values.items())) for name, values in sorted(result.items())}


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if _is_section(annotation):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _sections(field.annotation)
    for inner in get_args(annotation):
        yield from _sections(inner)


if __name__ == "__main__":
    FILE.write_text(as_json(neutral_values()), encoding="utf-8")
