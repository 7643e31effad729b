"""Every key of the config with its meaning, and what to write in place of a key that does not exist.

    zerolora keys [WORD]

Other tools' names for a key are those of the tables that `zerolora import` reads by.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

from zerolora.config.schema import Config, Overrides
from zerolora.errors import UserError, shown
from zerolora.registries import entries

Location = tuple[str, ...]
NAME = "NAME"
"""Stands for a name that the user chooses."""
OWNERS = ("runs", "continued", "grids", "searches")
LISTED = "`zerolora keys` lists all"
ALIKE, SIMILAR = 0.85, 0.65
"""Similarity (difflib) of a misspelt key, and of one that may be meant."""
MOST = 3
"""Keys in a message."""
KINDS = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text", "object": "keys"}


class ConfigKey(NamedTuple):
    """A key of the config."""

    path: Location
    kind: str
    """Its values."""
    default: str
    """Empty for a section."""
    meaning: str

    @property
    def dotted(self) -> str:
        """Its path, as in train.lora.r."""
        return ".".join(self.path)

    @property
    def line(self) -> str:
        """The first sentence of its meaning."""
        return f"{self.dotted}: {re.split(r'(?<!e.g)[.] ', self.meaning, maxsplit=1)[0].rstrip('.')}"

    @property
    def text(self) -> str:
        """All that is known of it, in a few lines."""
        names = ", ".join(dict.fromkeys(name for name, theirs in foreign_names() if self.path in theirs.paths))
        lines = [f"{self.dotted} ({self.kind}{'; default ' if self.default else ''}{self.default})", self.meaning]
        return "\n    ".join([*lines, *([f"elsewhere: {names}"] if names else [])])


class ForeignKey(NamedTuple):
    """A key of another tool."""

    paths: list[Location]
    """Its equals here; none if there is none."""
    reason: str
    """How its values are translated, or why it has no equal."""


@functools.cache
def known() -> list[ConfigKey]:
    """Return all keys, in the order of the schema. `data` has those of an entry of prepare."""
    schema = Config.model_json_schema()
    return list(_keys(schema, schema["$defs"], ()))


@functools.cache
def foreign_names() -> list[tuple[str, ForeignKey]]:
    """Return the keys of other tools, as the importers name them."""
    result = []
    for importer in entries("importers").values():
        for name, rule in importer.rules.items():
            ours = [tuple(path.split(".")) for path in re.split(r", | or ", rule.new) if path]
            paths = [(path[0], NAME, *path[2:]) if path[:2] == ("prepare", "rows") else path for path in ours]
            result.append((name.replace("[]", ""), ForeignKey(paths, rule.remark)))
    return result


def listed(word: str | None) -> str:
    """Return the keys with a word in their path, or as their name in another tool, with all that is known of them;
    without a word, a line for each key.

    Raises UserError if there are none.
    """
    if word is None:
        return "\n".join(key.line for key in known())
    theirs = {path for name, each in foreign_names() if word == name for path in each.paths}
    found = [key for key in known() if word in key.dotted or key.path in theirs]
    if not found:
        raise UserError(f"{shown(word)}: {instead(tuple(word.split('.')))}")
    return "\n".join(key.text for key in found)


def instead(location: Iterable[str]) -> str:
    """Return what to write in place of a key that does not exist, given its location."""
    location = tuple(location)
    siblings = [key.path for key in known() if _are_siblings(key.path, location)]
    if alike := _close(location[-1], siblings, ALIKE):
        return _meant(alike, location)
    whole, of_sections = _of_tools(location)
    if whole:
        return _foreign(whole, location)
    longer = [path for path in siblings if location[-1] in path[-1].split("_")]
    if 0 < len(longer) <= MOST:
        return _meant(longer, location)
    if elsewhere := _ending_in(location):
        return f"use {_joined(elsewhere, location)}"
    if of_sections:
        return _foreign(of_sections, location)
    paths = [key.path for key in known()]
    close = _close(location[-1], siblings, SIMILAR) or _close(location[-1], paths, ALIKE)
    if not close:
        theirs = [name for name, each in foreign_names() if each.paths]
        ending = [name for name in theirs if name.endswith(f"_{location[-1]}")]
        names = ending or get_close_matches(location[-1], theirs, 1, ALIKE)
        close = [path for name, each in foreign_names() if name in names for path in each.paths]
    return _meant(close, location) if close else LISTED


def _meant(paths: list[Location], location: Location) -> str:
    return f"did you mean {_joined(paths, location)}? {LISTED}"


def _joined(paths: Iterable[Location], location: Location) -> str:
    return " or ".join(dict.fromkeys(_placed(path, location) for path in list(paths)[:MOST]))


def _placed(path: Location, location: Location) -> str:
    """Return a dotted path, with the names that stand at `location`."""
    if location[0] == "data" and path[:2] == ("prepare", NAME):
        path = ("data", *path[2:])
    if location[0] in OWNERS and len(location) > 1 and path[0] in Overrides.model_fields:
        path = (*location[:2], *path)
    return ".".join(
        there if part == NAME and path[:number] == location[:number] else part
        for number, (part, there) in enumerate(zip(path, (*location, *[NAME] * len(path)), strict=False))
    )


def _are_siblings(path: Location, location: Location) -> bool:
    return len(path) == len(location) and all(
        part in (NAME, there) for part, there in zip(path[:-1], location[:-1], strict=True)
    )


def _close(name: str, paths: list[Location], cutoff: float) -> list[Location]:
    """Return the paths that end in a name similar to `name`, the nearest first."""
    names = get_close_matches(name, {path[-1] for path in paths}, MOST, cutoff)
    return [path for each in names for path in paths if path[-1] == each][:MOST]


def _ending_in(location: Location) -> list[Location]:
    """Return the keys in other sections that end as a location does, in as many parts as any does."""
    for start in range(len(location)):
        end = location[start:]
        if found := [key.path for key in known() if key.path[-len(end) :] == end]:
            return found
    return []


def _of_tools(location: Location) -> tuple[list[ForeignKey], list[ForeignKey]]:
    """Return the keys of other tools with the name of a location: its end, joined by dots or underscores; and those
    in their sections with its last part."""
    ends = [location[start:] for start in range(max(0, len(location) - 2), len(location))]
    names = [joint.join(end) for end in ends for joint in (".", "_")]
    whole = [theirs for wanted in names for name, theirs in foreign_names() if name == wanted]
    return whole, [theirs for name, theirs in foreign_names() if name.rpartition(".")[2] == location[-1]]


def _foreign(several: list[ForeignKey], location: Location) -> str:
    """Return what is here in place of a key of other tools, one of which may have an equal that another lacks."""
    chosen = next((each for each in several if each.paths), several[0])
    return f"use {_joined(chosen.paths, location)}" if chosen.paths else f"it has no equal here: {chosen.reason}"


def _keys(section: dict[str, Any], sections: dict[str, Any], path: Location) -> Iterator[ConfigKey]:
    """Yield the keys of a section of the JSON Schema, each before those inside it."""
    for name, value in section.get("properties", {}).items():
        here = (*path, name)
        inner = list(_sections_in(value, sections))
        required = "required" if name in section.get("required", ()) else ""
        default = required or ("" if inner else _default(value.get("default")))
        yield ConfigKey(
            here, " or ".join(dict.fromkeys(_kinds(value))), default, " ".join(value["description"].split())
        )
        for step, within in inner:
            if here != ("data",):
                yield from _keys(within, sections, (*here, *step))


def _sections_in(value: dict[str, Any], sections: dict[str, Any]) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield each section that a value can be or have, and the path to it."""
    if "$ref" in value:
        yield (), sections[value["$ref"].rpartition("/")[2]]
    for each in value.get("anyOf", ()):
        yield from _sections_in(each, sections)
    for step, part in (((NAME,), value.get("additionalProperties")), ((), value.get("items"))):
        if isinstance(part, dict):
            yield from ((step + further, section) for further, section in _sections_in(part, sections))


def _kinds(value: dict[str, Any]) -> Iterator[str]:
    """Yield the kinds of values that a key can have; null stands for a default."""
    if "enum" in value or "const" in value:
        yield ", ".join(str(each).lower() for each in value.get("enum", [value.get("const")]))
    elif "anyOf" in value:
        for each in value["anyOf"]:
            yield from _kinds(each)
    elif value.get("type") == "array":
        yield f"list of {' or '.join(_kinds(value.get('items', {})))}"
    elif "$ref" in value:
        yield "section"
    elif value.get("type") != "null":
        yield KINDS.get(value.get("type", ""), "any value")


def _default(value: Any) -> str:
    return "none" if value is None or value in ([], {}) else json.dumps(value, ensure_ascii=False)
