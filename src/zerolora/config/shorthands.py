"""The config's shorthands: `model`, `data`, `rounds` (round_entries.py), and no `hardware`.

    model: Qwen/Qwen2.5-0.5B-Instruct@COMMIT   # an entry of fetch.hub; a directory: of fetch.directory
    data: rows.jsonl                           # an entry of prepare, and a run of it unless there are others

They are written out before the config is checked, so that everything else reads one form of it.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.round_entries import entries_of
from zerolora.config.values import LONGEST_NAME, REPETITIVE, RESERVED_RUNS
from zerolora.errors import shown

Location = tuple[str, ...]

HELD_OUT = {"validation": 0.05, "test": 0.05}
"""The split of `data` without one."""
PINNED = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)@([0-9a-f]{40})")
OWNERS = ("runs", "continued", "grids", "searches")


class WrittenOut(NamedTuple):
    """A config without shorthands, and where its entries were written."""

    values: dict[str, Any]
    origins: dict[Location, Location]
    """The location in the file of each entry that a shorthand became."""

    def origin(self, location: Location) -> Location:
        """Return the location in the file of a location in `values`."""
        for end in range(len(location), 0, -1):
            if location[:end] in self.origins:
                return self.origins[location[:end]] + location[end:]
        return location


class ShorthandError(Exception):
    """A shorthand that cannot be written out: its location and the remedy."""


def written_out(values: dict[str, Any]) -> WrittenOut:
    """Return the values of a config without shorthands. Raises ShorthandError for one that means nothing.

    Invalid values elsewhere are left as they are, to be reported by the config's own check.
    """
    result = WrittenOut({key: value for key, value in values.items() if key not in ("model", "data")}, {})
    if "hardware" not in values:
        from zerolora.machine.this_machine import hardware

        result.values["hardware"] = hardware()
        train = result.values.get("train") or {}
        if isinstance(train, dict) and "gpus_per_node" in result.values["hardware"]:
            result.values["train"] = {"ranks_per_node": result.values["hardware"]["gpus_per_node"], **train}
    model = _model(values["model"], result) if "model" in values else None
    name = _data(values["data"], result) if "data" in values else None
    for each in _mappings(result.values.get("prepare")):
        if model:
            each.setdefault("model", model)
    if name:
        owners = [each for owner in OWNERS for each in _mappings(result.values.get(owner))]
        for each in owners:
            if "dataset" not in (each.get("over") or ()):
                each.setdefault("dataset", name)
        if not owners:
            result.values["runs"] = {name: {"dataset": name}}
            result.origins["runs", name] = ("data",)
    for name, section in _named_mappings(result.values.get("rounds")):
        for entry in entries_of(name, section, result.values):
            _add(entry.location, entry.value, entry.origin, result)
    return result


def slug(text: str, otherwise: str, reserved: Collection[str] = ()) -> str:
    """Return a text as a name in the config: lower-case letters, digits, - and _; `otherwise` if that is no name."""
    name = re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-_")[:LONGEST_NAME]
    return otherwise if not name or name in reserved or REPETITIVE.search(name) else name


def _model(value: Any, result: WrittenOut) -> str:
    """Add the entry of `fetch` for a base model; return its name."""
    if not isinstance(value, str) or not value:
        raise ShorthandError(("model",), f"{shown(value)} is not valid; use a directory, or NAME@COMMIT of the hub")
    pinned = PINNED.fullmatch(value)
    if "@" in value and not pinned:
        text = "give the full 40-digit commit after @, since a branch or a tag can move; `zerolora pin` looks it up"
        raise ShorthandError(("model",), f"{shown(value)}: {text}")
    if not pinned and not Path(value).is_dir():
        text = "there is no such directory; correct it, or use NAME@COMMIT for a model of the hub (`zerolora pin`)"
        raise ShorthandError(("model",), f"{shown(value)}: {text}")
    entry = {"repository": pinned[1], "revision": pinned[2]} if pinned else {"path": value}
    name = slug(pinned[1].partition("/")[2] if pinned else Path(value).resolve().name, "model")
    _add(("fetch", "hub" if pinned else "directory", name), entry, ("model",), result)
    return name


def _data(value: Any, result: WrittenOut) -> str:
    """Add the entry of `prepare` for a data set; return its name."""
    entry = {"path": value} if isinstance(value, str) else value
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or not entry["path"]:
        text = "give a file or directory of rows, or the keys of an entry of prepare: {path: rows.jsonl, …}"
        raise ShorthandError(("data",), f"{shown(value)}: {text}")
    name = slug(Path(entry["path"]).stem, "rows", RESERVED_RUNS)
    split = {} if "held_out" in entry else {"split": HELD_OUT}
    _add(("prepare", name), {**split, **entry}, ("data",), result)
    return name


def _add(location: Location, entry: dict[str, Any], origin: Location, result: WrittenOut) -> None:
    """Add an entry. Only the mappings on the way are copied: the file's own values stay as they are."""
    inner = result.values
    for part in location[:-1]:
        inner[part] = dict(inner[part]) if isinstance(inner.get(part), dict) else inner.get(part) or {}
        if not isinstance(inner[part], dict):
            return
        inner = inner[part]
    if location[-1] in inner:
        dotted = ".".join(location)
        raise ShorthandError(origin, f"{dotted}, its entry, is in the file too; remove one of the two")
    inner[location[-1]] = entry
    result.origins[location] = origin


def _mappings(section: Any) -> list[dict[str, Any]]:
    return [each for _, each in _named_mappings(section)]


def _named_mappings(section: Any) -> list[tuple[str, dict[str, Any]]]:
    return [each for each in section.items() if isinstance(each[1], dict)] if isinstance(section, dict) else []
