"""Checks of grids and searches, and the location in the config of a mistake in one of their runs."""

import itertools
from collections.abc import Iterable
from typing import Any, get_origin

from pydantic import TypeAdapter, ValidationError

from zerolora.config.grids import mistakes, repeated
from zerolora.config.known_keys import instead
from zerolora.config.objective_sections import ObjectiveSections
from zerolora.config.run_objectives import holds_out
from zerolora.config.schema import Config, Grid, Overrides, Range, RunSections, Search, with_values
from zerolora.config.section import Section
from zerolora.config.values import RESERVED_RUNS, SHARED_SECTIONS, Name
from zerolora.errors import shown

Mistake = tuple[tuple[str, ...], str]
OF_LOSS = [["train", name] for name in ("objective", *ObjectiveSections.model_fields)]
"""Keys, as parts, of which each value has another loss."""
NAMES: TypeAdapter[str] = TypeAdapter(Name)


def impossible_grids(config: Config) -> Iterable[Mistake]:
    """Yield (location, message) for grids and searches that cannot be expanded, or whose run names are taken."""
    for section, owners in (("grids", config.grids), ("searches", config.searches)):
        for owner, each in owners.items():
            yield from _wrong_keys(config, section, owner, each)
    for owner, search in config.searches.items():
        yield from _impossible_search(config, owner, search)
    taken = [*config.runs, *config.continued, *itertools.chain.from_iterable(config.names_by_owner.values())]
    for run in repeated(taken):
        holders = [owner for owner, names in config.names_by_owner.items() if run in names]
        if holders:  # otherwise reported for runs and continued
            yield holders[-1], f"has a run {run}, but so has another section, grid or search; choose another name"
    yield from _taken_folders(config)
    for (section, owner), names in config.names_by_owner.items():
        for run in names:
            try:
                NAMES.validate_python(run)
            except ValidationError as error:
                text = str(error.errors()[0]["ctx"]["error"])
                remedy = "name the values" if section == "grids" else "choose another name"
                key = "over" if section in ("grids", "searches") else "repeats"
                yield (section, owner, key), f"a run would be called {shown(run)}: {text}; {remedy}"
                break


def _impossible_search(config: Config, owner: str, search: Search) -> Iterable[Mistake]:
    for name in map(str, datasets_of(search)):
        if name in config.prepare and not holds_out(config, name, "validation"):
            text = f"compares validation losses, but {name} has no validation rows; set its split.validation"
            yield ("searches", owner), text
    for key in search.over:
        if key.split(".")[:2] in OF_LOSS:
            text = "changes the loss itself, so its values cannot be compared by it; use a grid, whose runs the "
            yield ("searches", owner, "over", key), f"{text}comparison shows by their held-out rows"
    steps = with_values({"validation_steps": config.train.validation_steps}, search.train)["validation_steps"]
    if search.prune and not steps and "train.validation_steps" not in search.over:
        yield (
            ("searches", owner, "prune"),
            "needs validation during training; set train: {validation_steps: N} in the search, or prune: false",
        )


def _wrong_keys(config: Config, section: str, owner: str, each: Grid | Search) -> Iterable[Mistake]:
    here = (section, owner, "over")
    if each.dataset is None and "dataset" not in each.over:
        yield (section, owner), "has no data set; set dataset: NAME, or over: {dataset: [NAME, ...]}"
    for name in datasets_of(each) if "dataset" in each.over else ():
        if not isinstance(name, str) or name not in config.prepare:
            text = f"{shown(name)} is not a data set of prepare; choose from {', '.join(config.prepare)}"
            yield (*here, "dataset"), text
    for key in each.over:
        if wrong := (None if key == "dataset" else _unknown(key)) or _is_fixed(each, key, section):
            yield (*here, key), wrong
    # A range has no value names to check.
    over = {key: [values.low] if isinstance(values, Range) else values for key, values in each.over.items()}
    for location, text in mistakes(over, each.repeats if isinstance(each, Grid) else 1):
        yield (*here, *location), text


def datasets_of(owner: Grid | Search) -> list[Any]:
    """Return the data sets that a grid or search trains on."""
    values = owner.over.get("dataset", [owner.dataset])
    if isinstance(values, Range):
        return [values.low]
    return [*values.values()] if isinstance(values, dict) else list(values)


def _taken_folders(config: Config) -> Iterable[Mistake]:
    """Yield grids and searches whose shared outputs would go to a directory of others."""
    folders = {name: f"the run {name}" for name in config.all_runs}
    for (section, owner), names in config.names_by_owner.items():
        # What repeats share is in the directory of the run that they repeat.
        own = [owner, *names] if section in ("runs", "continued") else names
        folders |= dict.fromkeys(own, f"the runs of {section}.{owner}")
    folders |= dict.fromkeys(RESERVED_RUNS, "another stage")
    for run, each in config.expanded_runs.items():
        for name in set(each.shared) - {run}:
            mine = f"the runs of {each.section}.{each.owner}"
            if (other := folders.setdefault(name, mine)) != mine:
                text = (
                    f"results/{name}/ is for outputs that its runs share, but belongs to {other}; choose another name"
                )
                yield (each.section, each.owner), text
                return


def location_of(config: Config, run: str, *key: str) -> tuple[str, ...]:
    """Return the location in the config of a key that a run overrides."""
    if run not in config.expanded_runs:
        return ("continued" if run in config.continued else "runs", run, *key)
    each = config.expanded_runs[run]
    if each.section in ("runs", "continued"):
        return (each.section, each.owner, *key)
    owner = (config.grids if each.section == "grids" else config.searches)[each.owner]
    for path in owner.over:
        parts = tuple(path.split("."))
        shortest = min(len(parts), len(key))
        if key and parts[:shortest] == key[:shortest]:
            return (each.section, each.owner, "over", path)
    return (each.section, each.owner, *key)


def _unknown(path: str) -> str | None:
    """Return the mistake in the dotted key of an override, None if it is valid."""
    parts = path.split(".")
    known = Overrides.model_fields
    if parts[0] in SHARED_SECTIONS:
        return f"{parts[0]} is shared by all runs and cannot be overridden; remove it"
    if parts[0] not in known:
        return f"there is no such key; {instead(parts)}"
    section: Any = RunSections
    for number, part in enumerate(parts):
        field = section.model_fields.get(part)
        if field is None:
            return f"there is no such key; {instead(parts[: number + 1])}"
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            rest = parts[number + 1 :]
            if not rest or (get_origin(section) is dict and len(rest) == 1):
                return None
            return f"there is no such key; use {'.'.join(parts[: number + 1])}, which has no keys"
    first = next(iter(section.model_fields))
    return None if len(parts) > 1 else f"is a whole section; use one of its keys, as in {path}.{first}"


def _is_fixed(owner: Grid | Search, path: str, section: str) -> str | None:
    """Return the mistake if a grid or search also overrides a key of `over` for all its runs."""
    word = "grid" if section == "grids" else "search"
    first, *parts = path.split(".")
    value: Any = getattr(owner, first)
    if path == "dataset" and value is None:
        return None
    for part in parts:
        if not isinstance(value, dict) or part not in value:
            return None if isinstance(value, dict) else f"conflicts with {first}, which the {word} also sets"
        value = value[part]
    return f"the {word} also sets {path}: {shown(value)} for all its runs; keep one of the two"
