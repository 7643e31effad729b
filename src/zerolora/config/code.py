"""The code fingerprint of each stage under its settings: which entries of the registries they choose."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerolora.config.fingerprint import Chosen, Fingerprints
from zerolora.config.grids import SHARED_STAGES
from zerolora.config.kept_results import code_of, read_kept
from zerolora.config.settings import (
    AskedTaskSettings,
    EvaluateSettings,
    PrepareSettings,
    Resolved,
    RunSettings,
    SelectSettings,
    TaskSettings,
)
from zerolora.config.stages import STAGES
from zerolora.files import canonical
from zerolora.registries import entries
from zerolora.strategies import STRATEGIES

OF_RUN = tuple(name for name, stage in STAGES.items() if stage.settings.startswith("runs."))
OF_METHOD = ("estimate", "render", "train", "merge")
"""Stages that compute with the method; others only check its adapter."""


class Codes(NamedTuple):
    """The fingerprints of every stage."""

    named: dict[str, Any]
    """By stage and, if it runs once for each model, data set or task, by name (results/config.json)."""
    runs: dict[str, dict[str, str]]
    """By run and stage (results/settings/runs/)."""
    shared: dict[str, dict[str, str]]
    """By shared name and stage (results/settings/shared/)."""


def codes(resolved: Resolved, known: Fingerprints | None = None) -> Codes:
    """Return the fingerprint of each stage under its settings; of results that the user keeps, the one that they were
    made with. Raises UserError if the file that names these is broken."""
    kept = read_kept()
    now = codes_of_today(resolved, known or Fingerprints())
    runs, shared = (
        {
            name: {stage: code_of(kept, f"{stage}@{name}", code) for stage, code in by_stage.items()}
            for name, by_stage in group.items()
        }
        for group in (now.runs, now.shared)
    )
    named = {
        stage: {name: code_of(kept, f"{stage}@{name}", code) for name, code in by_name.items()}
        for stage, by_name in now.named.items()
        if isinstance(by_name, dict)
    }
    # One value for all runs, to see whether anything has changed.
    of_runs = hashlib.sha256(canonical([runs, shared]).encode()).hexdigest()
    return Codes({**now.named, **named, "runs": of_runs}, runs, shared)


def kept_stages(resolved: Resolved) -> dict[str, list[str]]:
    """Return, by run, the stages whose results the user keeps although their code has changed."""
    kept = read_kept()
    if not kept:
        return {}
    now = codes_of_today(resolved, Fingerprints())

    def is_kept(stage: str, name: str, code: str) -> bool:
        return code_of(kept, f"{stage}@{name}", code) != code

    result = {}
    for name, run in resolved.runs.items():
        places = {stage: (name, code) for stage, code in now.runs[name].items()}
        places |= {
            stage: (shared, now.shared[shared][stage])
            for kind, stage in SHARED_STAGES._asdict().items()
            if getattr(run, stage) is not None and (shared := getattr(run, kind))
        }
        places |= {stage: (run.dataset, now.named[stage][run.dataset]) for stage in ("prepare", "evaluate_base")}
        result[name] = [stage for stage in STAGES if stage in places and is_kept(stage, *places[stage])]
        result[name] += [
            f"task {task}"
            for task in run.report.tasks
            if any(is_kept(stage, task, now.named[stage][task]) for stage in ("task", "task_base"))
        ]
    return {name: stages for name, stages in result.items() if stages}


def codes_of_today(resolved: Resolved, known: Fingerprints) -> Codes:
    """Return the fingerprint of each stage under its settings, whatever the user keeps."""
    runs = {
        name: {stage: known.of(stage, chosen_by_run(settings, stage)) for stage in OF_RUN}
        for name, settings in resolved.runs.items()
    }
    shared: dict[str, dict[str, str]] = {}
    for run in resolved.runs.values():
        for kind, stage in SHARED_STAGES._asdict().items():
            if getattr(run, stage) is None:
                continue
            shared.setdefault(getattr(run, kind), {})[stage] = known.of(stage, chosen_by_run(run, stage))
    formats = {name: settings.format for name, settings in resolved.task_rows.items()}
    tasks = {name: chosen_by_task(settings) for name, settings in resolved.tasks.items()}
    chosen: dict[str, Mapping[str, Chosen]] = {
        "prepare": {name: chosen_by_data(settings) for name, settings in resolved.prepare.items()},
        "evaluate_base": {name: chosen_by_check(settings) for name, settings in resolved.evaluate.items()},
        "task_rows": {name: chosen_by_forms({each}) for name, each in formats.items()},
        "task_base": tasks,
        "task": tasks,
        # Another model's answers are decided by no entry; `select` checks them.
        "sample": {name: {"evaluate.tasks": set(), "methods": set()} for name in resolved.samples},
        "held_out": {name: {} for name in resolved.held_out},
        "select": {name: chosen_by_check(each) for name, each in resolved.selections.items()},
        **{stage: {name: {} for name in getattr(resolved, stage)} for stage in STAGES if stage.startswith("fetch")},
    }
    named: dict[str, Any] = {
        stage: {name: known.of(stage, entries) for name, entries in by_name.items()}
        for stage, by_name in chosen.items()
    }
    named |= {stage: known.of(stage) for stage in ("resolve", "compare")}
    known.save()
    return Codes(named, runs, shared)


def chosen_by_run(run: RunSettings, stage: str) -> Chosen:
    """Return the entries that a run's settings choose in a stage."""
    chosen: dict[str, set[str]] = {
        **chosen_by_check(run.evaluate),
        "methods": {run.train.method} if stage in OF_METHOD else set(),
        "optimizers": {run.train.optimizer},
        "train.objectives": {run.train.objective},
        "export.targets": {*run.export.targets},
    }
    if stage == "train":
        asked = {task.check for task in run.train.validation_tasks if task.max_new_tokens} & entries("tasks").keys()
        chosen |= {"evaluate.tasks": asked, "train.engines": _engines(run.render.strategy)}
    if stage == "merge":
        # Families list a base's tensors without building its class, and only if the list agrees with the files.
        chosen["model.families"] = set()
    return chosen


def _engines(strategy: str) -> set[str]:
    """Return the engines that may train with render.strategy; a path is the user's DeepSpeed JSON."""
    if strategy == "auto":
        return {str(each.engine) for each in STRATEGIES.values()}
    return {str(STRATEGIES[strategy].engine) if strategy in STRATEGIES else "deepspeed"}


def chosen_by_data(data: PrepareSettings) -> Chosen:
    """Return the forms of rows that a data set's settings choose; all for `auto`."""
    forms = {data.format, *(source.format for source in data.sources.values() if source.format)}
    if data.path is None or (data.sources and all(source.format for source in data.sources.values())):
        forms.discard(data.format)
    if data.selections:
        forms.add("auto")  # the form that `select` writes
    return chosen_by_forms(forms)


def chosen_by_forms(forms: set[str]) -> Chosen:
    """Return the entries that these forms of rows choose. No objective: only messages have their names."""
    return {"train.objectives": (), **({} if "auto" in forms else {"data.formats": forms})}


def chosen_by_task(task: TaskSettings) -> Chosen:
    """Return the entries that the settings of a further evaluation task choose."""
    return chosen_by_check(task) if isinstance(task, AskedTaskSettings) else {"evaluate.tasks": set(), "methods": set()}


def chosen_by_check(settings: EvaluateSettings | AskedTaskSettings | SelectSettings) -> dict[str, set[str]]:
    """Return the entries that a check chooses: none for a user's file, whose text is a setting, and no method, since
    methods only check the adapter here."""
    return {"evaluate.tasks": {settings.check} & entries("tasks").keys(), "methods": set()}
