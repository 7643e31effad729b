"""The arguments of a stage's function: the paths of its files, its settings, and options of `zerolora stage`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zerolora.config.grids import Shared
from zerolora.config.stages import PLACEHOLDER, Stage
from zerolora.errors import UserError, shown
from zerolora.files import read_object
from zerolora.report.run_settings import run_names, settings_of_run

RESULTS = Path("results")


def arguments_of(
    stage: Stage,
    function: Callable[..., None],
    given: Sequence[str],
    settings: dict[str, Any] | None,
    names: Mapping[str, str],
    prefix: str = "",
) -> dict[str, Any]:
    """Return the arguments of a stage's function.

    `given` are values of the stage's wildcards, then pairs of --PARAMETER and value. Other files are where the stage's
    entry has them, below `prefix`. Names and settings that are not given are read from what `resolve` wrote.

    Raises UserError for an unknown option, a value that its parameter does not take, and a missing one.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    wildcards, options = _divided(stage, given)
    if unknown := [key for key in options if key not in parameters or key == "settings"]:
        known = ", ".join(_option(key) for key in parameters if key != "settings")
        raise UserError(f"{_option(unknown[0])} is no option of the stage {stage.name}, which has {known}")
    if wildcards.keys() == {*stage.wildcards}:
        names = {**wildcards, **names}
        if not names.keys() >= stage.names:
            names = {**_resolved_names(names), **names}
        if settings is None and "settings" in parameters:
            settings = _resolved_settings(stage, names)
    arguments: dict[str, Any] = {name: value for name, value in names.items() if name in parameters}
    arguments |= {key: Path(prefix + path) for key, path in _paths(stage, names).items() if key in parameters}
    arguments |= {key: _typed(key, text, parameters[key].annotation) for key, text in options.items()}
    if settings is not None and "settings" in parameters:
        arguments["settings"] = settings
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            usage = " ".join(["zerolora stage", stage.name, *(name.upper() for name in stage.wildcards)])
            raise UserError(f"stage {stage.name}: {_option(key)} is missing; pass it, or `{usage}` for all that it has")
    return arguments


def names_in(text: str) -> dict[str, str]:
    """Return the names in NAME=VALUE,…. Raises UserError for anything else."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if any(not equals for _, equals, _ in pairs):
        raise UserError(f"--names {shown(text)}: use NAME=VALUE,…, as in dataset=rows,model=tiny")
    return {name: value for name, _, value in pairs}


def _divided(stage: Stage, given: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values of the wildcards, and those of the options by parameter."""
    count = next((number for number, text in enumerate(given) if text.startswith("--")), len(given))
    if count not in (0, len(stage.wildcards)):
        expected = " ".join(name.upper() for name in stage.wildcards) or "no name"
        raise UserError(f"zerolora stage {stage.name} {' '.join(given[:count])}: give {expected} after {stage.name}")
    options: dict[str, str] = {}
    rest = [part for text in given[count:] for part in (text.split("=", 1) if text.startswith("--") else [text])]
    if len(rest) % 2 or not all(key.startswith("--") for key in rest[::2]):
        raise UserError(f"zerolora stage {stage.name}: {shown(' '.join(rest))}: pass --OPTION VALUE for each option")
    for key, value in zip(rest[::2], rest[1::2], strict=True):
        options[key.removeprefix("--").replace("-", "_")] = value
    return dict(zip(stage.wildcards, given[:count], strict=False)), options


def _paths(stage: Stage, names: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of a stage's files whose names are known. An empty name stands for a file that the run does not
    have."""
    known = {name for name, value in names.items() if value}
    return {key: path.format(**names) for key, path in stage.files.items() if known >= {*PLACEHOLDER.findall(path)}}


def _resolved_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a run, or of the first one that has the shared output; those of a sample; the model of a data
    set."""
    found: dict[str, str] = {}
    if questions := names.get("questions"):
        settings = _read(RESULTS / "config.json", "held_out", questions)
        return {"dataset": settings.get("dataset") or "", "task": settings.get("task") or ""}
    sample = names.get("sample")
    if selection := names.get("selection"):
        sample = _read(RESULTS / "config.json", "selections", selection)["samples"]
    if sample:
        settings = _read(RESULTS / "config.json", "samples", sample)
        found = {"sample": sample, "dataset": settings["dataset"], "run": settings["of"].get("run", "")}
    elif run := names.get("run") or _run_with(names):
        settings = settings_of_run(RESULTS, run)
        found = {key: settings.get(key, "") for key in ("dataset", *Shared._fields)}
        found["teacher"] = settings["teacher"]["model"] if settings.get("teacher") else ""
    if dataset := names.get("dataset") or found.get("dataset"):
        data = _read(RESULTS / "config.json", "prepare", dataset)
        found["model"] = data["model"]
    return found


def _run_with(names: Mapping[str, str]) -> str | None:
    """Return the first run that has a shared output."""
    shared = {key: names[key] for key in Shared._fields if key in names}
    for run in run_names(RESULTS) if shared else []:
        settings = settings_of_run(RESULTS, run)
        if all(settings.get(key) == value for key, value in shared.items()):
            return run
    return None


def _resolved_settings(stage: Stage, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a stage that `resolve` wrote."""
    group, *keys = (key.format(**names) for key in stage.settings.split("."))
    file = RESULTS / f"settings/{group}/{keys[0]}.json" if group in ("runs", "shared") else RESULTS / "config.json"
    return _read(file, group, *keys)


def _read(file: Path, *keys: str) -> dict[str, Any]:
    """Return an entry of a file of `resolve`. Raises UserError if it has none."""
    value: Any = read_object(file, "zerolora stage resolve")
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise UserError(
                f"{file}: has no {'.'.join(keys)}; run `zerolora stage resolve` if config/config.yaml has it"
            )
        value = value[key]
    return dict(value)


def _typed(key: str, text: str, annotation: Any) -> Any:
    """Return the value of an option. Raises UserError if its parameter does not take it."""
    try:
        return TypeAdapter(annotation).validate_python(text)
    except ValidationError as error:
        raise UserError(f"{_option(key)} {shown(text)}: {error.errors()[0]['msg']}") from None


def _option(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"
