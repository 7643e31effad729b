"""Values of a config from several sources: its file, --configfile, --config, a module's `config:`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from zerolora.errors import UserError, shown
from zerolora.yaml_file import check_size, composed

Location = tuple[str, ...]
SHOWN = 300
"""Characters of the overrides in a message."""


class SourcedValues(NamedTuple):
    """Values, and the source of each: file and line, or an option."""

    values: dict[str, Any]
    sources: dict[Location, str]

    def over(self, base: "SourcedValues") -> "SourcedValues":
        """Return the values of `base` with these merged over them, key by key; a list replaces a list."""
        return SourcedValues(_merged(base.values, self.values), base.sources | self.sources)


class RunOverrides(NamedTuple):
    """What a run has besides the config file."""

    parts: tuple[SourcedValues, ...] = ()
    about: str = ""
    """Names them for the user, as in --config train.max_steps=50."""
    replaces: bool = False
    """Whether the config file is not read."""


def from_arguments(entries: Iterable[str], option: str) -> SourcedValues:
    """Return the values of KEY=VALUE, each VALUE as in the config file; KEY may be dotted. Raises UserError if it is
    not YAML."""
    result = SourcedValues({}, {})
    for entry in entries:
        key, equals, text = entry.partition("=")
        location = tuple(key.split("."))
        if not equals or not all(location):
            raise UserError(f"{option}: {shown(entry)}: use KEY=VALUE, as in train.max_steps=50")
        try:
            loader, node = composed(text)
            check_size(node)
            value = None if node is None else loader.construct_document(node)
        except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
            why = " ".join(str(getattr(error, "problem", None) or error).split())
            raise UserError(f"{option}: {key}: {shown(text)}: {why}; use a value of YAML") from None
        values: dict[str, Any] = {location[-1]: value}
        for part in reversed(location[:-1]):
            values = {part: values}
        result = from_mapping(values, option).over(result)
    return result


def from_mapping(values: Mapping[str, Any], source: str) -> SourcedValues:
    """Return values of one source."""
    return SourcedValues(dict(values), {location: source for location, _ in _leaves(values)})


def listed(values: Mapping[str, Any]) -> str:
    """Return the values as KEY=VALUE, separated by blanks."""
    text = " ".join(f"{'.'.join(location)}={_compact(value)}" for location, value in _leaves(values))
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def nested(entries: Sequence[str], option: str) -> list[str]:
    """Return dotted KEY=VALUE as arguments of Snakemake's --config, one for each section."""
    values = from_arguments(entries, option).values
    return [f"{section}={_compact(value)}" for section, value in values.items()]


ORIGIN = "# values: "


def origin_line(about: str) -> str:
    """Return the first line of a config that was written of a file and overrides."""
    return f"{ORIGIN}{' '.join(about.split())}"


def origin_of(text: str) -> str:
    """Return what names the overrides in a config's text; empty if it is a user's file."""
    first = text.partition("\n")[0]
    return first.removeprefix(ORIGIN) if first.startswith(ORIGIN) else ""


def ineffective(config: Mapping[str, Any], over: SourcedValues) -> list[str]:
    """Return a line for each value that a run of the config replaces by its own."""
    lines = []
    for location, value in _leaves(over.values):
        for name, run in (config.get("runs") or {}).items():
            own = run
            for part in location:
                own = own.get(part) if isinstance(own, dict) else None
            if own is not None and own != value and (*("runs", name), *location) not in over.sources:
                key = ".".join(location)
                lines.append(f"{key}={_compact(value)}: run {name} sets {key} to {_compact(own)}, which it uses")
    return lines


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: _merged(base.get(key), value) for key, value in over.items()}


def _leaves(values: Any, location: Location = ()) -> Iterable[tuple[Location, Any]]:
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from _leaves(value, (*location, str(key)))
    else:
        yield location, values
