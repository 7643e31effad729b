"""Checks over several sections of the config; a section checks itself (`faults` in its class).

`impossible` lists the checks in the order of their messages. run_checks.py has those of a run's sections, and
continued_checks.py those of runs that continue from an adapter.
"""

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from zerolora.config.continued_checks import (
    impossible_origin,
    impossible_reference,
    impossible_teacher,
    unlike_origin,
)
from zerolora.config.grid_rules import datasets_of, impossible_grids, location_of
from zerolora.config.resolve import models_by_source, models_on_load, run_sections
from zerolora.config.run_checks import impossible_run
from zerolora.config.run_objectives import holds_out, reference_adapter, row_kinds, teacher_of
from zerolora.config.sample_checks import impossible_samples
from zerolora.config.schema import Config, Prepare, Train, data_folders
from zerolora.config.section import Fault
from zerolora.config.selection_checks import impossible_selections
from zerolora.config.task_checks import unusable_task
from zerolora.config.user_files import user_template
from zerolora.config.values import HUB_ADAPTERS, RESERVED_RUNS
from zerolora.data.formats import FORMS
from zerolora.errors import UserError, shown
from zerolora.evaluate.tasks import TASKS
from zerolora.fail_if import OF_LABELLED, OF_MERGED, OF_PAIRS, parse
from zerolora.methods.registry import TRAINABLE
from zerolora.train.objectives import OBJECTIVES
from zerolora.types import RowKind

LEARNS_FROM: dict[RowKind, str] = {"texts": "texts", "pairs": "pairs", "labelled": "labelled answers"}
"""What an objective learns from, by what its rows hold."""


def impossible(config: Config, before_first_trial: bool = False) -> Iterable[Fault]:
    """Yield (location, message) for each invalid combination of values. `before_first_trial` allows no runs."""
    if grids := list(impossible_grids(config)):
        yield from grids
        return  # the runs are unknown
    yield from models_of_one_name(config)
    for name, data in config.prepare.items():
        yield from unknown_model(config, name)
        yield from unreadable_template(data, ("prepare", name))
        yield from unusable_task(data.check, data.check_settings, ("prepare", name))
        yield from _at(("prepare", name), data.faults())
        yield from rows_that_the_objective_does_not_read(config, name)
    yield from impossible_tasks(config)
    yield from outputs_of_one_name(config)
    yield from impossible_gate(config)
    yield from impossible_engine(config)
    if config.train.from_adapter is not None:
        yield ("train", "from_adapter"), "would apply to all runs; set it in each run of `continued` instead"
    if not config.all_runs:
        yield from () if before_first_trial else no_run(config)
        return
    for name in config.all_runs:
        if name in RESERVED_RUNS:
            yield location_of(config, name), f"results/{name}/ is used by another stage; choose another name"
        yield from unknown_data_set(config, name)
        yield from impossible_origin(config, name)
        yield from impossible_reference(config, name)
        yield from impossible_teacher(config, name)
        yield from impossible_run(config, name)
        yield from unlike_origin(config, name)
    yield from impossible_samples(config)
    yield from impossible_selections(config)
    if not _has_unknown_names(config):  # a misspelt name would be reported twice
        yield from unused_models(config)
        yield from unused_downloads(config)
        yield from unused_data_sets(config)


def _at(location: tuple[str, ...], faults: Iterable[Fault]) -> Iterable[Fault]:
    """Yield the faults of a section at its location in the config."""
    for key, text in faults:
        yield (*location, *key), text


def models_of_one_name(config: Config) -> Iterable[Fault]:
    """Yield models whose name is in another group of `fetch` too."""
    owners: dict[str, str] = {}
    for source, models in models_by_source(config):
        for name in models:
            if name in owners:
                yield ("fetch", source, name), f"{name} is in fetch.{owners[name]} too; give one another name"
            owners[name] = source


def unknown_model(config: Config, name: str) -> Iterable[Fault]:
    """Yield the model of a data set if it is not in `fetch`."""
    known = [model for _, models in models_by_source(config) for model in models]
    if (model := config.prepare[name].model) not in known:
        text = f"{shown(model)} is not in fetch; use one of {', '.join(dict.fromkeys(known)) or 'none: add it there'}"
        yield ("prepare", name, "model"), text


def unknown_data_set(config: Config, run: str) -> Iterable[Fault]:
    """Yield the data set of a run if it is not in `prepare`."""
    if (name := config.all_runs[run].dataset) not in config.prepare:
        text = f"{shown(name)} is not a data set of prepare; use one of {', '.join(config.prepare)}"
        yield location_of(config, run, "dataset"), text


def _has_unknown_names(config: Config) -> bool:
    models = any(fault for name in config.prepare for fault in unknown_model(config, name))
    return models or any(fault for run in config.all_runs for fault in unknown_data_set(config, run))


def unreadable_template(data: Prepare, here: tuple[str, ...]) -> Iterable[Fault]:
    """Yield a user's chat template that cannot be read or compiled."""
    try:
        user_template(data.template)
    except UserError as error:
        yield (*here, "template"), str(error)


def rows_that_the_objective_does_not_read(config: Config, name: str) -> Iterable[Fault]:
    """Yield settings of a data set that do not suit the objectives of its runs."""
    data, kinds, here = config.prepare[name], row_kinds(config, name), ("prepare", name)
    if len(kinds) > 1:
        (one, of_one), (two, of_two) = list(kinds.items())[:2]
        text = f"{of_one}, which learn from {LEARNS_FROM[one]}, and {of_two}, which learn from {LEARNS_FROM[two]}"
        yield here, f"is used by runs with objective {text}; prepare a data set for each"
        return
    kind, objective = next(iter(kinds.items()), ("texts", ""))
    formats: dict[tuple[str, ...], str] = {(*here, "format"): data.format}
    formats |= {(*here, "sources", key, "format"): each.format for key, each in data.sources.items() if each.format}
    for where, value in formats.items():
        if value != "auto" and FORMS[value].rows != kind:
            known = ", ".join(form for form in FORMS if FORMS[form].rows == kind)
            objectives = ", ".join(each for each in OBJECTIVES if OBJECTIVES[each].rows == FORMS[value].rows)
            text = f"{value}, but its runs have objective {objective}, which learns from {LEARNS_FROM[kind]}"
            yield where, f"{text}; use {known} or auto, or train.objective: {objectives}"
    if kind == "texts":
        return
    if data.min_length > 1:
        yield (*here, "min_length"), f"{data.min_length} with objective {objective}, whose rows all count; remove it"
    if data.concatenate:
        yield (*here, "concatenate"), f"{data.concatenate} with objective {objective}, whose rows stay whole; remove it"
    if data.loss not in ("assistant", "last"):
        text = f"{shown(data.loss)} with objective {objective}, which compares answers; use assistant"
        yield (*here, "loss"), text
    if data.too_long not in ("fail", "drop", "truncate_left"):
        text = f"{data.too_long} with objective {objective}, for which no answer is cut"
        yield (*here, "too_long"), f"{text}; use fail, drop or truncate_left, which shortens the prompt"


def impossible_tasks(config: Config) -> Iterable[Fault]:
    """Yield mistakes in the evaluation tasks."""
    tasks = config.tasks
    for name in tasks.rows.keys() & tasks.harness.keys():
        yield ("tasks", "harness", name), f"{name} is in tasks.rows too; give one another name"
    for name, task in tasks.rows.items():
        yield from unusable_task(task.check, task.check_settings, ("tasks", "rows", name))
        ask = TASKS[task.check].ask if task.check in TASKS else None
        yield from _at(("tasks", "rows", name), task.faults(ask))


def outputs_of_one_name(config: Config) -> Iterable[Fault]:
    """Yield tasks whose name, joined to that of a run or data set by a hyphen as DVC does, is not unique."""
    tasks = config.tasks
    for owners in (config.all_runs, config.prepare):
        joined: dict[str, tuple[str, str]] = {}
        for owner in owners:
            for name in [*tasks.rows, *tasks.harness]:
                other = joined.setdefault(f"{owner}-{name}", (owner, name))
                if other != (owner, name):
                    group = "rows" if name in tasks.rows else "harness"
                    text = f"{owner} with {name} and {other[0]} with {other[1]} have one name in DVC; rename the task"
                    yield ("tasks", group, name), text


def impossible_gate(config: Config) -> Iterable[Fault]:
    """Yield mistakes in evaluate.fail_if: no evaluation, no rows, or an unknown metric."""
    condition, here = config.evaluate.fail_if, ("evaluate", "fail_if")
    if condition is None:
        return
    if not config.evaluate.enabled:
        yield here, f"{shown(condition)} needs an evaluation; set evaluate.enabled: true, or remove the condition"
    for name in config.prepare:
        if not holds_out(config, name, "test") and not holds_out(config, name, "validation"):
            text = f"0, and 0 test rows, but evaluate.fail_if, {shown(condition)}, judges them; use 1 or more"
            yield ("prepare", name, "split", "validation"), text
    gate = parse(condition)
    for name, data in config.prepare.items():
        if data.check not in TASKS:  # the metrics of a user's file are known only when it runs
            continue
        known = _metrics_of(config, name)
        if config.merge.enabled and not gate.relative:
            known += OF_MERGED
        if gate.metric not in known:
            yield here, f"{shown(condition)}: {name} has no metric {gate.metric}; use one of {', '.join(known)}"


def _metrics_of(config: Config, name: str) -> list[str]:
    """Return the metrics of a data set's evaluation: the loss, and those of its task and of its kind of rows."""
    registered = TASKS[config.prepare[name].check]
    example = registered.example
    task = registered.configured(example.settings)
    row = {"question": example.question, "expected": example.expected, "prompt": 1}
    kind = next(iter(row_kinds(config, config.prepare[name].held_out or name)), "texts")
    preference = {"pairs": OF_PAIRS, "labelled": OF_LABELLED}.get(kind, ())
    return ["loss", *task.metrics([task.judge(row, example.right)]), *preference]


def impossible_engine(config: Config) -> Iterable[Fault]:
    """Yield settings that vLLM does not support; evaluate/vllm_engine.py checks what the config does not show."""
    evaluate = config.evaluate
    yield from _at(("evaluate",), evaluate.faults_of_engine())
    if evaluate.engine != "vllm" or not evaluate.enabled:
        return
    for name, data in config.prepare.items():
        if data.add_tokens or data.add_special_tokens:
            key = "add_tokens" if data.add_tokens else "add_special_tokens"
            text = "adds tokens to the base model, which evaluate.engine: vllm reads unchanged"
            yield ("prepare", name, key), f"{text}; set evaluate.engine: transformers, or remove them"
    for key in models_on_load(config):
        text = "on_load, and evaluate.engine: vllm would read its files without dequantizing them"
        yield (*key.split("."), "dequantize"), f"{text}; set it to on_fetch, or evaluate.engine: transformers"
    for name, run in config.all_runs.items():
        try:
            settings = run_sections(config, name)
        except ValidationError:
            continue  # reported by impossible_run
        merged = settings.merge.enabled
        if (evaluate.unmerged or not merged) and (more := _more_than_lora(settings.train)):
            key, on, off = ("evaluate.unmerged", "true", "false") if merged else ("merge.enabled", "false", "true")
            text = f"with {key}: {on}, and evaluate.engine: vllm does not support this adapter"
            at = location_of(config, name, "train", *more) if more[0] in run.train else ("train", *more)
            yield at, f"{text}; set evaluate.engine: transformers, or {key}: {off}"


def _more_than_lora(train: Train) -> tuple[str, ...] | None:
    """Return the key of `train` that adds more than LoRA factors to an adapter, None if there is none."""
    method = TRAINABLE[train.method]
    if method.peft_type != "LORA" or method.options:
        return ("method",)
    keys = ("modules_to_save", "rank_pattern", "alpha_pattern")
    return next((("lora", key) for key in keys if getattr(train.lora, key)), None)


def no_run(config: Config) -> Iterable[Fault]:
    """Yield each search, which has no trial yet; `runs` if there is none."""
    for name in config.searches:
        remedy = f"run `zerolora search {name} -- COMMAND` (docs/search.md)"
        yield ("searches", name), f"has no run, since no values were chosen yet or all trials failed; {remedy}"
    if not config.searches:
        yield ("runs",), "defines no run; add one here, e.g. default: {dataset: NAME}, or a grid in grids"


def unused_models(config: Config) -> Iterable[Fault]:
    """Yield models that no data set is prepared for."""
    used = {data.model for data in config.prepare.values()}
    used |= {teacher.model for run in config.all_runs if (teacher := teacher_of(config, run))}
    for source, models in models_by_source(config):
        for name in models:
            if name not in used:
                yield ("fetch", source, name), "no data set uses this model; name it in prepare, or remove it"


def unused_downloads(config: Config) -> Iterable[Fault]:
    """Yield data that no data set or task reads, and adapters that no run continues from."""
    paths = [Path(path) for data in config.prepare.values() for path in data.reads]
    paths += [Path(task.path) for task in config.tasks.rows.values()]
    for fetched, where in data_folders(config.fetch).items():
        group, _, name = fetched.partition(".")
        folder = Path(where)
        if not any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in paths):
            text = f"no data set's path is {folder} or inside it; use it in prepare, or remove it"
            yield ("fetch", group, name), text
    starts = {run.train.get("from_adapter") for run in config.continued.values()}
    starts |= {reference_adapter(config, name) for name in config.all_runs}
    starts |= {teacher.adapter for run in config.all_runs if (teacher := teacher_of(config, run))}
    for name in config.fetch.adapter:
        if (path := f"{HUB_ADAPTERS}/{name}") not in starts:
            text = f"no run continues from it; set train: {{from_adapter: {path}}} in a run of continued"
            yield ("fetch", "adapter", name), f"{text}, or remove it"


def unused_data_sets(config: Config) -> Iterable[Fault]:
    """Yield data sets that no run or search is trained on, whose prompts no sample asks, and that no selection is
    compared with."""
    used = {*config.used_data}
    used |= {name for search in config.searches.values() for name in datasets_of(search)}
    used |= {data.held_out for data in config.prepare.values() if data.held_out}
    for name in config.prepare:
        if name not in used:
            text = "no run or sample uses this data set; name it in the dataset of one, in held_out, or remove it"
            yield ("prepare", name), text
