"""What is wrong with a grid or a search itself, and where in the config a mistake of one of its runs is."""

import itertools
from collections.abc import Iterable
from typing import Any, get_origin

from pydantic import TypeAdapter, ValidationError

from zerolora.config.grids import mistakes, repeated
from zerolora.config.ranges import Range
from zerolora.config.schema import SHARED_SECTIONS, Config, Grid, Name, Run, RunSections, Search, with_values
from zerolora.config.section import Section
from zerolora.errors import shown

Mistake = tuple[tuple[str, ...], str]
NAMES: TypeAdapter[str] = TypeAdapter(Name)


def impossible_grids(config: Config) -> Iterable[Mistake]:
    """Yield (location, message) for grids and searches that cannot be expanded, or whose runs have names of others."""
    for section, owner, each in _owners(config):
        here = (section, owner, "over")
        for key in each.over:
            if text := _unknown(key) or _given_twice(each, key, section):
                yield (*here, key), text
        # A range has no names that could be wrong.
        over = {key: [values.low] if isinstance(values, Range) else values for key, values in each.over.items()}
        for location, text in mistakes(over):
            yield (*here, *location), text
    for owner, search in config.searches.items():
        steps = with_values({"validation_steps": config.train.validation_steps}, search.train)["validation_steps"]
        if search.prune and not steps and "train.validation_steps" not in search.over:
            yield (
                ("searches", owner, "prune"),
                "needs validation losses on the way; write train: {validation_steps: N} in the search, or prune: false",
            )
    taken = [*config.runs, *config.continued, *itertools.chain.from_iterable(config.names_by_owner.values())]
    for run in repeated(taken):
        owners = [owner for owner, names in config.names_by_owner.items() if run in names]
        if owners:  # else it is reported elsewhere
            yield owners[-1], f"has a run {run}, and so has another section, grid or search; choose another name"
    for (section, owner), names in config.names_by_owner.items():
        for run in names:
            try:
                NAMES.validate_python(run)
            except ValidationError as error:
                text = str(error.errors()[0]["ctx"]["error"])
                remedy = "name the values" if section == "grids" else "choose another name"
                yield (section, owner, "over"), f"a run would be called {shown(run)}: {text}; {remedy}"
                break


def place(config: Config, run: str, *key: str) -> tuple[str, ...]:
    """Return where the config has a key of a run's own."""
    if run not in config.expanded_runs:
        return ("continued" if run in config.continued else "runs", run, *key)
    each = config.expanded_runs[run]
    owner = (config.grids if each.section == "grids" else config.searches)[each.owner]
    for path in owner.over:
        parts = tuple(path.split("."))
        shortest = min(len(parts), len(key))
        if key and parts[:shortest] == key[:shortest]:
            return (each.section, each.owner, "over", path)
    return (each.section, each.owner, *key)


def _owners(config: Config) -> Iterable[tuple[str, str, Grid | Search]]:
    for name, grid in config.grids.items():
        yield "grids", name, grid
    for name, search in config.searches.items():
        yield "searches", name, search


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


def _given_twice(owner: Grid | Search, path: str, section: str) -> str | None:
    word = "grid" if section == "grids" else "search"
    first, *parts = path.split(".")
    value: Any = getattr(owner, first)
    for part in parts:
        if not isinstance(value, dict) or part not in value:
            return None if isinstance(value, dict) else f"stands beside {first}, which the {word} says too"
        value = value[part]
    return f"the {word} says {path}: {shown(value)} for all its runs too; write one of the two"
