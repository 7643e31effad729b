"""The code fingerprint of each stage under its settings: which entries of the registries they choose."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerolora.config.fingerprint import Chosen, Fingerprints
from zerolora.config.registry_names import OPTIMIZERS, PROMPT_FORMATS, STRATEGIES, TASKS
from zerolora.config.settings import (
    AskedTaskSettings,
    EvaluateSettings,
    PrepareSettings,
    Resolved,
    RunSettings,
    TaskSettings,
)
from zerolora.config.sharing import STAGES as SHARED
from zerolora.config.stages import STAGES
from zerolora.files import canonical

OF_RUN = tuple(name for name, stage in STAGES.items() if stage.settings.startswith("runs."))
OF_METHOD = ("estimate", "render", "train", "merge")
"""Stages that compute with the method; others only check the adapter that it made."""
NOTHING: Chosen = {}
"""Of stages whose settings choose no entry."""
REFERENCE_OPTIMIZER = next(iter(OPTIMIZERS))
"""The one that the planner compares others with: a probe measures its rate."""


class Codes(NamedTuple):
    """The fingerprints of every stage."""

    named: dict[str, Any]
    """By stage, and by name where a stage runs once for each model, data set or task: results/config.json."""
    runs: dict[str, dict[str, str]]
    """By run and stage: results/settings/runs/."""
    shared: dict[str, dict[str, str]]
    """By the name that runs share and stage: results/settings/shared/."""


def codes(resolved: Resolved, known: Fingerprints | None = None) -> Codes:
    """Return the fingerprint of each stage under its settings."""
    known = known or Fingerprints()
    runs = {
        name: {stage: known.of(stage, chosen_by_run(settings, stage)) for stage in OF_RUN}
        for name, settings in resolved.runs.items()
    }
    shared: dict[str, dict[str, str]] = {}
    for run in resolved.runs.values():
        for kind, stage in SHARED._asdict().items():
            shared.setdefault(getattr(run, kind), {})[stage] = known.of(stage, chosen_by_run(run, stage))
    rows = {name: chosen_by_rows(settings.format) for name, settings in resolved.task_rows.items()}
    asked = {name: chosen_by_task(settings) for name, settings in resolved.tasks.items()}
    chosen: dict[str, Mapping[str, Chosen]] = {
        "prepare": {name: chosen_by_data(settings) for name, settings in resolved.prepare.items()},
        "evaluate_base": {name: chosen_by_check(settings) for name, settings in resolved.evaluate.items()},
        "task_rows": rows,
        "task_base": asked,
        "task": asked,
        **{stage: dict.fromkeys(getattr(resolved, stage), NOTHING) for stage in _fetching()},
    }
    named: dict[str, Any] = {
        stage: {name: known.of(stage, entries) for name, entries in by_name.items()}
        for stage, by_name in chosen.items()
    }
    named |= {stage: known.of(stage) for stage in ("resolve", "compare")}
    # For whoever asks whether anything has changed: one value for all runs.
    named["runs"] = hashlib.sha256(canonical([runs, shared]).encode()).hexdigest()
    known.save()
    return Codes(named, runs, shared)


def _fetching() -> list[str]:
    return [name for name in STAGES if name.partition("_")[0] == "fetch"]


def chosen_by_run(run: RunSettings, stage: str) -> Chosen:
    """Return the entries that a run's settings choose in a stage. Estimates and choices are of every strategy."""
    chosen: dict[str, set[str]] = {
        **chosen_by_check(run.evaluate),
        "methods": {run.train.method} if stage in OF_METHOD else set(),
        "optimizers": {run.train.optimizer, REFERENCE_OPTIMIZER},
        "train.objectives": {run.train.objective},
        "export.targets": {*run.export.targets},
    }
    if stage == "train":
        # A strategy's options are in zero.json; training calls none of its code.
        of_train = {"train.engines": _engines(run.render.strategy), "strategies": set[str]()}
        chosen |= {"optimizers": {run.train.optimizer}, **of_train}
    if stage == "merge":
        # They list a base without building its class, and only where the list is that of the files.
        chosen["model.families"] = set()
    return chosen


def _engines(strategy: str) -> set[str]:
    """Return the engines that may train under render.strategy; the user's own DeepSpeed JSON is DeepSpeed's."""
    if strategy == "auto":
        return {*STRATEGIES.values()}
    return {STRATEGIES.get(strategy, "deepspeed")}


def chosen_by_data(data: PrepareSettings) -> Chosen:
    """Return the entries that a data set's settings choose: forms, of which `auto` tries all, and a prompt format."""
    forms = {data.format, *(source.format for source in data.sources.values() if source.format)}
    if data.sources and all(source.format for source in data.sources.values()):
        forms.discard(data.format)
    formats = {data.template} & {*PROMPT_FORMATS}
    return {"data.prompt_formats": formats, **({} if "auto" in forms else {"data.formats": forms})}


def chosen_by_rows(form: str) -> Chosen:
    """Return the entries that the form of a task's rows chooses."""
    return {} if form == "auto" else {"data.formats": {form}}


def chosen_by_task(task: TaskSettings) -> Chosen:
    """Return the entries that a further task's settings choose."""
    return chosen_by_check(task) if isinstance(task, AskedTaskSettings) else {"evaluate.tasks": set(), "methods": set()}


def chosen_by_check(settings: EvaluateSettings | AskedTaskSettings) -> dict[str, set[str]]:
    """Return the entries that a check chooses; a file of the user's is compared by its text.

    It chooses no method: those only check the adapter that a model is asked with."""
    return {"evaluate.tasks": {settings.check} & TASKS.keys(), "methods": set()}
