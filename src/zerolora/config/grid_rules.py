"""What is wrong with a grid itself, and where in the config a mistake of one of its runs is."""

import itertools
from collections.abc import Iterable
from typing import Any, get_origin

from pydantic import TypeAdapter, ValidationError

from zerolora.config.grids import mistakes, repeated
from zerolora.config.schema import SHARED_SECTIONS, Config, Grid, Name, Run, RunSections
from zerolora.config.section import Section
from zerolora.errors import shown

Mistake = tuple[tuple[str, ...], str]
NAMES: TypeAdapter[str] = TypeAdapter(Name)


def impossible_grids(config: Config) -> Iterable[Mistake]:
    """Yield (location, message) for grids that cannot be expanded, or whose runs have names of others."""
    for name, grid in config.grids.items():
        here = ("grids", name, "over")
        for key in grid.over:
            if text := _unknown(key) or _given_twice(grid, key):
                yield (*here, key), text
        for location, text in mistakes(grid.over):
            yield (*here, *location), text
    taken = [*config.runs, *config.continued, *itertools.chain.from_iterable(config.names_by_grid.values())]
    for run in repeated(taken):
        grids = [name for name, names in config.names_by_grid.items() if run in names]
        if grids:  # else it is reported elsewhere
            yield ("grids", grids[-1]), f"has a run {run}, and so has another section or grid; choose another name"
    for name, names in config.names_by_grid.items():
        for run in names:
            try:
                NAMES.validate_python(run)
            except ValidationError as error:
                text = str(error.errors()[0]["ctx"]["error"])
                yield ("grids", name, "over"), f"a run would be called {shown(run)}: {text}; name the values"
                break


def place(config: Config, run: str, *key: str) -> tuple[str, ...]:
    """Return where the config has a key of a run's own."""
    if run not in config.grid_runs:
        return ("continued" if run in config.continued else "runs", run, *key)
    grid = config.grid_runs[run][0]
    for path in config.grids[grid].over:
        parts = tuple(path.split("."))
        shortest = min(len(parts), len(key))
        if key and parts[:shortest] == key[:shortest]:
            return ("grids", grid, "over", path)
    return ("grids", grid, *key)


def _unknown(path: str) -> str | None:
    """Return what is wrong with the path of a key that a run may override."""
    parts = path.split(".")
    known: Iterable[str] = [name for name in Run.model_fields if name != "dataset"]
    if parts[0] in SHARED_SECTIONS:
        return f"{parts[0]} is shared by all runs and cannot be overridden; remove it"
    if parts[0] not in known:
        return f"there is no such key; write one that begins with {', '.join(known)}, as in train.lora.r"
    section: Any = RunSections
    for number, part in enumerate(parts):
        field = section.model_fields.get(part)
        if field is None:
            before = ".".join(parts[:number])
            return f"{before} has no key {shown(part)}; write one of {', '.join(section.model_fields)}"
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            rest = parts[number + 1 :]
            if not rest or (get_origin(section) is dict and len(rest) == 1):
                return None
            return f"there is no such key; write {'.'.join(parts[: number + 1])}, which has no keys itself"
    first = next(iter(section.model_fields))
    return None if len(parts) > 1 else f"is a whole section; write a key of it, as in {path}.{first}"


def _given_twice(grid: Grid, path: str) -> str | None:
    first, *parts = path.split(".")
    value: Any = getattr(grid, first)
    for part in parts:
        if not isinstance(value, dict) or part not in value:
            return None if isinstance(value, dict) else f"stands beside {first}, which the grid says too"
        value = value[part]
    return f"the grid says {path}: {shown(value)} for all its runs too; write one of the two"
