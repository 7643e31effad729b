"""The settings of a run at a revision, by key, and the config of a probe with some of them.

They are what the config's files say, not the resolved values, so that a default that the code changed belongs to the
code. The run's overrides are merged over the sections, and other runs are left out, so that a key stands for the value
that the run has, wherever it was written.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from zerolora.config.file import load, read_written_out
from zerolora.config.schema import Config, RunSections
from zerolora.errors import UserError, shown

CONFIG = Path("config/config.yaml")
OF_CONFIG = ("config/config.yaml", "config/experiments", "config/searches", "config/runs.yaml", "config/kept")
"""What a probe's config stands for. Results that are kept despite other code would hide what the code does."""
Key = tuple[str, ...]
Values = dict[Key, Any]
DATASET: Key = ("dataset",)
SEED: Key = ("train", "seed")
START: Key = ("train", "from_adapter")
OWNERS = ("runs", "continued", "grids", "searches")
PARENT = "results/"
"""Start of the adapter of another run, in train.from_adapter."""
MISSING = object()


def read(directory: Path, run: str | None, revision: str) -> tuple[str, Values]:
    """Return the run, and its settings, of the project's files in `directory`. Without a run, that of a config that has
    one alone.

    Raises UserError, beginning with the revision, if the config cannot be read, has no such run, or several.
    """
    try:
        with contextlib.chdir(directory):
            values = read_written_out(CONFIG)
            written = {**_mapping(values, "runs"), **_mapping(values, "continued")}
            names = list(written)
            if not names or (run is not None and run not in names) or _mapping(values, "grids"):
                expanded = load(CONFIG, before_first_trial=True).all_runs
                names = list(expanded)
                if run is None and len(names) == 1:
                    (run,) = names
                if run in expanded and run not in written:
                    own = expanded[run].model_dump(exclude={"repeats"}, exclude_unset=True)
                    written[run] = {key: value for key, value in own.items() if value}
    except UserError as error:
        raise UserError(f"{revision}: {error}") from None
    if run is None and len(names) != 1:
        raise UserError(f"{revision}: {CONFIG} has {len(names)} runs; choose one with --run: {', '.join(names)}")
    run = names[0] if run is None else run
    if run not in written:
        raise UserError(f"{revision}: {CONFIG} has no run {shown(run)}; choose among {', '.join(names)}")
    start = written[run].get("train", {}).get("from_adapter") or _mapping(values, "train").get("from_adapter")
    if isinstance(start, str) and start.startswith(PARENT):
        raise UserError(
            f"{revision}: {run} continues from {start}, which a change may alter too; bisect the run that made it, or "
            "a copy of its adapter in the project"
        )
    return run, _values(values, written[run])


def nested(values: Values, run: str, repeats: int) -> str:
    """Return the text of a config with these settings and one run."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        section = result
        for part in key[:-1]:
            section = section.setdefault(part, {})
        section[key[-1]] = value
    own = {"dataset": result.pop(*DATASET), **({"repeats": repeats} if repeats > 1 else {})}
    for name in ("fetch", "prepare"):
        result.setdefault(name, {})
    if START in values:  # is allowed there alone
        own["train"] = {START[1]: result["train"].pop(START[1])}
    result["continued" if START in values else "runs"] = {run: own}
    return yaml.safe_dump(result, sort_keys=False, allow_unicode=True)


def differing(good: Values, bad: Values) -> list[Key]:
    """Return the keys that differ. Of models, data sets and adapters that only one has, none: they do nothing until
    another key names them, and a probe has those of both."""
    keys = [*good, *(key for key in bad if key not in good)]
    return [
        key
        for key in keys
        if key != SEED and good.get(key, MISSING) != bad.get(key, MISSING) and not _alone(key, good, bad)
    ]


def mixed(good: Values, bad: Values, applied: frozenset[Key]) -> Values:
    """Return the good settings with some keys of the bad ones."""
    result = dict(good)
    result |= {key: value for key, value in bad.items() if _alone(key, good, bad)}
    for key in applied:
        if key in bad:
            result[key] = bad[key]
        else:
            result.pop(key, None)
    return result


def named_files(*values: Values) -> set[str]:
    """Return each text among the values, of which some are names of files."""
    return {text for each in values for value in each.values() for text in _texts(value)}


def data_paths(*values: Values) -> set[str]:
    """Return the paths of data sets and of rows of tasks."""
    return {
        str(value)
        for each in values
        for key, value in each.items()
        if (key[0] == "prepare" and key[2:] == ("path",)) or (key[:2] == ("tasks", "rows") and key[3:] == ("path",))
    }


def text_of(key: Key, good: Values, bad: Values) -> str:
    """Return a change for a line, as in train.learning_rate 0.0002 -> 0.002."""
    before, after = (shown(values[key]) if key in values else "(default)" for values in (good, bad))
    return f"{'.'.join(key)} {before} -> {after}"


def _alone(key: Key, good: Values, bad: Values) -> bool:
    """Return whether a key belongs to an entry of `fetch` or `prepare` that only one of both has."""
    depth = {"fetch": 3, "prepare": 2}.get(key[0])
    if depth is None:
        return False
    entry = key[:depth]
    return any(all(each[:depth] != entry for each in values) for values in (good, bad))


def _values(values: Mapping[str, Any], own: Mapping[str, Any]) -> Values:
    """Return the settings by key: sections key by key, an entry of `fetch` as a whole, since its revision and its hash
    belong together. Other data sets than the run's are left out."""
    result: Values = {DATASET: own.get("dataset")}
    for name, value in values.items():
        if name in OWNERS:
            continue
        section = Config.model_fields[name].annotation if name in Config.model_fields else None
        if name == "prepare":
            value = {entry: each for entry, each in value.items() if entry == own.get("dataset")}  # noqa: PLW2901
        if name == "fetch":
            result |= {
                (name, source, entry): each for source, group in value.items() for entry, each in (group or {}).items()
            }
        else:
            result |= dict(_leaves(section, value, (name,)))
    for name in RunSections.model_fields.keys() & own.keys():
        result |= dict(_leaves(RunSections.model_fields[name].annotation, own[name], (name,)))
    return result


def _leaves(annotation: Any, value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """Yield the values by key: into sections and mappings of sections, not into other mappings, which are replaced as
    a whole."""
    section = next((each for each in (annotation, *get_args(annotation)) if _is_section(each)), None)
    if isinstance(value, dict) and value and section is not None:
        for name, each in value.items():
            if annotation_is_mapping(annotation):
                yield from _leaves(section, each, (*key, str(name)))
            else:
                field = section.model_fields.get(name)
                yield from _leaves(field.annotation if field else None, each, (*key, str(name)))
    else:
        yield key, value


def annotation_is_mapping(annotation: Any) -> bool:
    """Return whether a field is a mapping of names to sections."""
    return getattr(annotation, "__origin__", None) is dict


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _mapping(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}
