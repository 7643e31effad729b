"""Checks of combinations of config values."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zerolora.config.grid_rules import datasets_of, impossible_grids, location_of
from zerolora.config.method_sections import DEFAULT_INIT, Quantization
from zerolora.config.resolve import (
    device_precision,
    models_by_source,
    peak_learning_rate,
    run_sections,
    stages_of,
    user_config,
)
from zerolora.config.run_objectives import row_kinds
from zerolora.config.schema import AskedTask, Config, Prepare, RunSections, Train, data_folders
from zerolora.config.user_files import settings_with_files, user_task, user_template
from zerolora.config.values import HUB_ADAPTERS, RESERVED_RUNS, remedy
from zerolora.data.formats import FORMS
from zerolora.errors import UserError, shown
from zerolora.evaluate.tasks import TASKS
from zerolora.export.targets import TARGETS
from zerolora.fail_if import OF_LABELLED, OF_MERGED, OF_PAIRS, parse
from zerolora.methods import lora_init
from zerolora.methods.registry import TRAINABLE
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.hardware import GPUS, NETWORKS, NODE_LINKS, offered
from zerolora.planner.run_hardware import hardware_of, target_of
from zerolora.planner.user_config import check_user_config, layout_of
from zerolora.schedules import ONE_CYCLE, SCHEDULES, too_short
from zerolora.strategies import STRATEGIES
from zerolora.train.objectives import OBJECTIVES
from zerolora.types import RowKind

LEARNS_FROM: dict[RowKind, str] = {"texts": "texts", "pairs": "pairs", "labelled": "labelled answers"}
"""What an objective learns from, by what its rows hold."""

PLAIN_LORA = ("lora", "qlora")
"""Methods whose adapter consists only of LoRA factors."""
LORA_KEYS = {
    "r": "r",
    "alpha": "lora_alpha",
    "rank_stabilized": "use_rslora",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
}
"""Keys of train.lora that decide the meaning of an adapter's tensors, and their names in peft's config."""
TENSOR_KEYS = ("targets", "modules_to_save")
"""Keys of a method's section that decide which tensors exist."""
MOST_LISTED = 10  # names in a message
RUN_ADAPTER = re.compile(r"results/([^/]+)/adapter/?")
Mistake = tuple[tuple[str, ...], str]
"""(location in the config, message)."""
RunMistake = tuple[str, str]
"""(dotted key below a run's sections, message)."""


def impossible(config: Config, before_first_trial: bool = False) -> Iterable[Mistake]:
    """Yield (location, message) for each invalid combination of values. `before_first_trial` allows no runs."""
    if grids := list(impossible_grids(config)):
        yield from grids
        return  # the runs are unknown
    owners: dict[str, str] = {}
    for source, models in models_by_source(config):
        for name in models:
            if name in owners:
                yield ("fetch", source, name), f"{name} is in fetch.{owners[name]} too; give one another name"
            owners[name] = source
    dangling = False
    for name, data in config.prepare.items():
        if data.model not in owners:
            dangling = True
            text = f"{shown(data.model)} is not in fetch; write one of {', '.join(owners) or 'none: add it there'}"
            yield ("prepare", name, "model"), text
        yield from _impossible_data(config, name)
        yield from _impossible_rows(config, name)
    yield from _impossible_tasks(config)
    yield from _impossible_gate(config)
    yield from _impossible_engine(config)
    if config.train.from_adapter is not None:
        yield ("train", "from_adapter"), "would apply to all runs; write it in each run of `continued` instead"
    if not config.all_runs:
        yield from () if before_first_trial else _no_run(config)
        return
    for name, run in config.all_runs.items():
        if name in RESERVED_RUNS:
            yield location_of(config, name), f"results/{name}/ is used by another stage; choose another name"
        if run.dataset not in config.prepare:
            dangling = True
            text = f"{shown(run.dataset)} is not a data set of prepare; write one of {', '.join(config.prepare)}"
            yield location_of(config, name, "dataset"), text
        yield from _impossible_start(config, name)
        yield from _impossible_in(config, name)
        yield from _impossible_from(config, name)
    if not dangling:  # a misspelt name would be reported twice
        yield from _unused(config)


def _no_run(config: Config) -> Iterable[Mistake]:
    for name in config.searches:
        remedy = f"run `zerolora search {name} -- COMMAND` (docs/grids.md)"
        yield ("searches", name), f"has no run, since no values were chosen yet or all trials failed; {remedy}"
    if not config.searches:
        yield ("runs",), "defines no run; write one here, e.g. default: {dataset: NAME}, or a grid in grids"


def _impossible_tasks(config: Config) -> Iterable[Mistake]:
    tasks = config.tasks
    for name in tasks.rows.keys() & tasks.harness.keys():
        yield ("tasks", "harness", name), f"{name} is in tasks.rows too; give one another name"
    for name, task in tasks.rows.items():
        here = ("tasks", "rows", name)
        yield from _impossible_check(here, task)
        ask = TASKS[task.check].ask if task.check in TASKS else None
        if ask == "choices" and (task.choices is None or task.prompt is None or task.answer is None):
            yield (*here, "check"), f"{task.check} needs prompt, choices and answer; write all three"
        if ask in ("generate", "loss") and task.choices is not None:
            yield (*here, "choices"), f"{task.check} has no choices; remove them, or write check: multiple_choice"
        if task.prompt is not None and task.answer is None and ask not in ("loss", None):
            yield (*here, "prompt"), "needs an answer; write the template of the right answer too"
    names = [*tasks.rows, *tasks.harness]
    # DVC joins the names of a run, or a data set, and of a task with a hyphen.
    for owners in (config.all_runs, config.prepare):
        joined: dict[str, tuple[str, str]] = {}
        for owner in owners:
            for name in names:
                other = joined.setdefault(f"{owner}-{name}", (owner, name))
                if other != (owner, name):
                    group = "rows" if name in tasks.rows else "harness"
                    text = f"{owner} with {name} and {other[0]} with {other[1]} have one name in DVC; rename the task"
                    yield ("tasks", group, name), text


def _impossible_check(here: tuple[str, ...], section: Prepare | AskedTask) -> Iterable[Mistake]:
    """Yield mistakes in the task that checks answers. The user's Python file is not executed."""
    try:
        user_task(section.check)
    except UserError as error:
        yield (*here, "check"), str(error)
    try:
        settings = settings_with_files(section.check_settings)
        if section.check in TASKS:
            TASKS[section.check].configured(settings)
    except (UserError, ValueError) as error:
        yield (*here, "check_settings"), str(error)


def _impossible_engine(config: Config) -> Iterable[Mistake]:
    """Yield settings that vLLM does not support; evaluate/vllm_engine.py checks what the config does not show."""
    evaluate = config.evaluate
    if evaluate.engine != "vllm":
        if evaluate.vllm_python is not None:
            yield ("evaluate", "vllm_python"), "is used only with engine: vllm; write engine: vllm, or remove it"
        return
    if evaluate.ranks > 1:
        yield ("evaluate", "ranks"), f"{evaluate.ranks} with engine: vllm, which processes all rows at once; write 1"
    for name, data in config.prepare.items() if evaluate.enabled else ():
        if data.add_tokens or data.add_special_tokens:
            key = "add_tokens" if data.add_tokens else "add_special_tokens"
            text = "adds tokens to the base model, which evaluate.engine: vllm reads unchanged"
            yield ("prepare", name, key), f"{text}; write evaluate.engine: transformers, or remove them"
    for name, run in config.all_runs.items() if evaluate.enabled else ():
        try:
            settings = run_sections(config, name)
        except ValidationError:
            continue  # reported by _impossible_in
        key = "evaluate.unmerged" if settings.merge.enabled else "merge.enabled"
        if (evaluate.unmerged or not settings.merge.enabled) and (more := _more_than_lora(settings.train)):
            at = ("train", *more.split("."))
            on, off = ("true", "false") if settings.merge.enabled else ("false", "true")
            text = f"with {key}: {on}, and evaluate.engine: vllm does not support this adapter"
            text = f"{text}; write evaluate.engine: transformers, or {key}: {off}"
            yield location_of(config, name, *at) if at[1] in run.train else at, text


def _more_than_lora(train: Train) -> str | None:
    """Return the key of `train` that adds more than LoRA factors to an adapter, None if there is none."""
    if train.method not in PLAIN_LORA:
        return "method"
    keys = ("modules_to_save", "rank_pattern", "alpha_pattern")
    return next((f"lora.{key}" for key in keys if getattr(train.lora, key)), None)


def _impossible_gate(config: Config) -> Iterable[Mistake]:
    """Yield mistakes in evaluate.fail_if: no evaluation, or an unknown metric."""
    condition, here = config.evaluate.fail_if, ("evaluate", "fail_if")
    if condition is None:
        return
    if not config.evaluate.enabled:
        yield here, f"{shown(condition)} needs an evaluation; set evaluate.enabled: true, or remove the condition"
    for name, data in config.prepare.items():
        if not data.holds_out("test") and not data.holds_out("validation"):
            text = f"0, and 0 test rows, but evaluate.fail_if, {shown(condition)}, judges them; write 1 or more"
            yield ("prepare", name, "split", "validation"), text
    gate = parse(condition)
    metric, merged = gate.metric, OF_MERGED if config.merge.enabled and not gate.relative else ()
    for name, data in config.prepare.items():
        if data.check not in TASKS:  # the metrics of a user's file are known only when it runs
            continue
        example = TASKS[data.check].example
        task = TASKS[data.check].configured(example.settings)
        row = {"question": example.question, "expected": example.expected, "prompt": 1}
        kind = next(iter(row_kinds(config, name)), "texts")
        preference = {"pairs": OF_PAIRS, "labelled": OF_LABELLED}.get(kind, ())
        known = ["loss", *task.metrics([task.judge(row, example.right)]), *preference, *merged]
        if metric not in known:
            yield here, f"{shown(condition)}: {name} has no metric {metric}; write one of {', '.join(known)}"


def _impossible_start(config: Config, run: str) -> Iterable[Mistake]:
    """Yield mistakes in `from_adapter`, which dvc.yaml can only track for runs in `continued`."""
    start = config.all_runs[run].train.get("from_adapter")
    here = location_of(config, run, "train", "from_adapter")
    if run in config.runs or not config.is_continued(run):
        if run in config.continued:
            yield here[:2], f"{run} is in runs too; give one another name"
        elif start is not None:
            yield here, "is only allowed in `continued`, whose runs both engines order after it; move the run there"
        return
    if not isinstance(start, str) or not start:
        example = f"results/{next((name for name in config.all_runs if name != run), 'NAME')}/adapter"
        yield here[:2], f"needs an adapter; write train: {{from_adapter: {example}}}, or move the run to runs"
        return
    seen = [run]
    while (match := RUN_ADAPTER.fullmatch(start)) and match[1] in config.all_runs:
        if match[1] in seen:
            yield here, f"{start} continues from {' and '.join(seen)} itself; name another adapter"
            return
        seen.append(match[1])
        start = str(config.all_runs[match[1]].train.get("from_adapter") or "")
    if start.startswith("results/"):
        each = config.expanded_runs.get(run)
        same = config.names_by_owner[each.section, each.owner] if each else seen
        known = [f"results/{name}/adapter" for name in config.all_runs if name not in same and name not in seen]
        listed = ", ".join(known[:MOST_LISTED]) + ", ..." * (len(known) > MOST_LISTED)
        yield here, f"{shown(start)} is not a run's adapter; write one of {listed}"
    elif Path(start).is_relative_to(HUB_ADAPTERS) and Path(start).name not in config.fetch.adapter:
        yield here, f"{shown(start)} is not fetched; add {Path(start).name} to fetch.adapter"


def _impossible_from(config: Config, run: str) -> Iterable[Mistake]:
    """Yield settings that conflict with those of the run that a run continues from."""
    start = config.all_runs[run].train.get("from_adapter")
    result = RUN_ADAPTER.fullmatch(start) if config.is_continued(run) and isinstance(start, str) else None
    if not result or result[1] not in config.all_runs or result[1] == run:
        return
    try:
        mistakes = list(_unlike_origin(config, run, result[1]))
    except ValidationError:  # reported by _impossible_in
        return
    for key, message in mistakes:
        own = key[0] != "prepare" and key[1] in getattr(config.all_runs[run], key[0])
        yield location_of(config, run, *key) if own else key, message


def _unlike_origin(config: Config, run: str, origin: str) -> Iterable[Mistake]:
    """Yield (location, message) for each setting of `run` that prevents it from loading the adapter of `origin`.

    Locations are relative to the run's sections or the config. Raises ValidationError if a section of either run is
    invalid.
    """
    train, theirs = (run_sections(config, each).train for each in (run, origin))
    adapter = f"results/{origin}/adapter"
    if _kind(train) != _kind(theirs):
        text = f"{train.method}, but {adapter} was trained with {theirs.method}; write {theirs.method}"
        yield ("train", "method"), text
    else:
        for section in TRAINABLE[train.method].sections:
            ours, expected = (_meaning(each, section, publishes=each is theirs) for each in (train, theirs))
            for key, value in expected.items():
                if ours[key] != value:
                    text = f"{shown(ours[key])}, but that of {adapter} is {shown(value)}"
                    if key in LORA_KEYS and theirs.lora.init != DEFAULT_INIT:
                        text += f" (with init {theirs.lora.init}, it has twice the rank)"
                    yield ("train", section, key), f"{text}; write {key}: {shown(value)}"
    yield from _unlike_data(config, run, origin)


def _kind(train: Train) -> tuple[str | None, bool]:
    """Return the kind of adapter: peft's type, None for all weights, and whether it is DoRA."""
    method = TRAINABLE[train.method]
    return method.peft_type, getattr(method, "options", {}).get("use_dora", False)


def _meaning(train: Train, section: str, publishes: bool) -> dict[str, Any]:
    """Return the keys of a method's section that decide the meaning of the adapter that a run builds or `publishes`."""
    settings = getattr(train, section).model_dump()
    result = {
        key: sorted(set(value)) if isinstance(value := settings[key], list) else value
        for key in TENSOR_KEYS & settings.keys()
    }
    if section == "lora":
        lora = {name: settings[key] for key, name in LORA_KEYS.items()}
        lora = lora_init.doubled(lora) if publishes and settings["init"] != DEFAULT_INIT else lora
        result |= {key: lora[name] for key, name in LORA_KEYS.items()}
    return result


def _unlike_data(config: Config, run: str, origin: str) -> Iterable[Mistake]:
    names = [config.all_runs[each].dataset for each in (run, origin)]
    if any(name not in config.prepare for name in names):  # reported elsewhere
        return
    data, theirs = (config.prepare[name] for name in names)
    adapter = f"{run} continues from results/{origin}/adapter"
    models = {name: model for _, models in models_by_source(config) for name, model in models.items()}
    if data.model != theirs.model and models.get(data.model) != models.get(theirs.model):
        text = f"{data.model}, but {adapter}, whose base is {theirs.model}"
        yield ("prepare", names[0], "model"), f"{text}; write {theirs.model}, or another data set in {run}"
    for key in ("add_special_tokens", "add_tokens"):
        actual, expected = getattr(data, key), shown(getattr(theirs, key))
        if actual != getattr(theirs, key):
            text = f"{shown(actual)}, but {adapter}, which was trained with {expected}"
            yield ("prepare", names[0], key), f"{text}; write {key}: {expected}"


def _impossible_data(config: Config, name: str) -> Iterable[Mistake]:
    data = config.prepare[name]
    here = ("prepare", name)
    try:
        user_template(data.template)
    except UserError as error:
        yield (*here, "template"), str(error)
    yield from _impossible_check(here, data)
    added = [*data.add_special_tokens, *data.add_tokens]
    for key in ("add_special_tokens", "add_tokens"):
        if twice := next((token for token in getattr(data, key) if added.count(token) > 1), None):
            yield (*here, key), f"{shown(twice)} occurs twice; write it once"
    weighed = any(source.weight for source in data.sources.values())
    for key, source in data.sources.items():
        at = (*here, "sources", key)
        if Path(key).is_absolute() or ".." in Path(key).parts:
            yield at, f"leads out of {data.path}; name a file or folder below it"
        if source.weight and source.rows:
            yield (*at, "weight"), "conflicts with rows; write one of the two"
        if source.at_most and source.rows:
            yield (*at, "at_most"), "conflicts with rows, which may repeat rows; write one of the two"
        if source.split in ("validation", "test") and (source.weight or source.rows):
            yield at, f"is the {source.split} split, which is used in full; remove weight and rows"
        elif weighed and not source.weight and not source.rows and source.split in (None, "train"):
            yield at, "has no weight, but other sources have; give it a weight or rows"


def _impossible_rows(config: Config, name: str) -> Iterable[Mistake]:
    """Yield mistakes in a data set, given what the objectives of its runs need its rows to hold."""
    data, kinds = config.prepare[name], row_kinds(config, name)
    here = ("prepare", name)
    if len(kinds) > 1:
        (one, of_one), (two, of_two) = list(kinds.items())[:2]
        text = f"{of_one}, which learn from {LEARNS_FROM[one]}, and {of_two}, which learn from {LEARNS_FROM[two]}"
        yield here, f"is used by runs with objective {text}; write a data set for each"
        return
    kind, objective = next(iter(kinds.items()), ("texts", ""))
    for key, value in ((None, data.format), *((key, source.format) for key, source in data.sources.items())):
        where = (*here, "format") if key is None else (*here, "sources", key, "format")
        if value not in (None, "auto") and FORMS[value].rows != kind:
            known = ", ".join(form for form in FORMS if FORMS[form].rows == kind)
            objectives = ", ".join(each for each in OBJECTIVES if OBJECTIVES[each].rows == FORMS[value].rows)
            text = f"{value}, but its runs have objective {objective}, which learns from {LEARNS_FROM[kind]}"
            yield where, f"{text}; write {known} or auto, or train.objective: {objectives}"
    if kind == "texts":
        return
    if data.loss not in ("assistant", "last"):
        text = f"{shown(data.loss)} with objective {objective}, which compares answers; write assistant"
        yield (*here, "loss"), text
    if data.too_long not in ("fail", "drop", "truncate_left"):
        text = f"{data.too_long} with objective {objective}, for which no answer is cut"
        yield (*here, "too_long"), f"{text}; write fail, drop or truncate_left, which shortens the prompt"


def _unused(config: Config) -> Iterable[Mistake]:
    used_models = {data.model for data in config.prepare.values()}
    used_data = {run.dataset for run in config.all_runs.values()}
    used_data |= {name for search in config.searches.values() for name in datasets_of(search)}
    starts = {run.train.get("from_adapter") for run in config.continued.values()}
    for source, models in models_by_source(config):
        for name in models:
            if name not in used_models:
                yield ("fetch", source, name), "no data set uses this model; name it in prepare, or remove it"
    for fetched, where in data_folders(config.fetch).items():
        group, _, name = fetched.partition(".")
        folder = Path(where)
        paths = [Path(data.path) for data in config.prepare.values()]
        paths += [Path(task.path) for task in config.tasks.rows.values()]
        if not any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in paths):
            text = f"no data set's path is {folder} or inside it; write that in prepare, or remove it"
            yield ("fetch", group, name), text
    for name in config.fetch.adapter:
        if (path := f"{HUB_ADAPTERS}/{name}") not in starts:
            text = f"no run continues from it; write train: {{from_adapter: {path}}} in a run of continued"
            yield ("fetch", "adapter", name), f"{text}, or remove it"
    for name in config.prepare:
        if name not in used_data:
            yield ("prepare", name), "no run uses this data set; name it in a run's dataset, or remove it"


def _impossible_in(config: Config, run: str) -> Iterable[Mistake]:
    """Yield mistakes in the sections of a run."""
    try:
        settings = run_sections(config, run)
    except ValidationError as error:
        for mistake in error.errors():
            where = tuple(str(part) for part in mistake["loc"])
            yield location_of(config, run, *where), remedy(mistake)
        return
    data = config.prepare.get(config.all_runs[run].dataset)
    for path, text in itertools.chain(
        _impossible_batch(settings),
        _impossible_validation(settings.train, data),
        _impossible_validation_tasks(config, settings.train, data),
        _impossible_kernels(settings),
        _impossible_method(settings.train, data),
        _impossible_objective(settings.train),
        _impossible_merge(settings),
        _impossible_strategy(config, run, settings),
        _impossible_optimizer(settings.train),
        _impossible_precision(settings),
    ):
        section, key, *inner = path.split(".")
        here = key in getattr(config.all_runs[run], section)
        yield (*(location_of(config, run, section, key) if here else (section, key)), *inner), text


def _impossible_batch(settings: RunSections) -> Iterable[RunMistake]:
    hardware, train = settings.hardware, settings.train
    ranks, shared = train.nodes * train.ranks_per_node, train.sequence_parallel
    data_ranks = ranks // shared
    groups = f"{ranks} ranks" if shared == 1 else f"{data_ranks} groups of {shared} ranks (sequence_parallel)"
    if hardware.device == "cuda" and train.ranks_per_node > (gpus := hardware.gpus_per_node):
        text = f"{train.ranks_per_node} ranks on a node of {gpus} GPUs (hardware.gpus_per_node); write {gpus} or less"
        yield "train.ranks_per_node", text
    if train.nodes > hardware.nodes:
        text = f"{train.nodes} nodes of {hardware.nodes} (hardware.nodes); write {hardware.nodes} or less"
        yield "train.nodes", text
    elif ranks % shared:
        divisors = " or ".join(str(each) for each in range(1, ranks + 1) if ranks % each == 0)
        yield "train.sequence_parallel", f"{ranks} ranks are not a multiple of {shared}; write {divisors}"
    elif train.micro_batch == "auto" and train.global_batch % data_ranks:
        text = f"{train.global_batch} is not a multiple of {groups}; write a multiple of {data_ranks}"
        yield "train.global_batch", text
    elif train.micro_batch != "auto" and train.global_batch % (train.micro_batch * data_ranks):
        text = f"{train.global_batch} is not a multiple of micro_batch {train.micro_batch} x {groups}"
        yield "train.global_batch", f"{text}; write a multiple of {train.micro_batch * data_ranks}"
    if shared > 1 and train.attention in ("sdpa", "eager"):
        text = f"{train.attention} with sequence_parallel {shared}, which needs attention without a mask of whole rows"
        yield "train.attention", f"{text}; write flash or auto"
    if shared > 1 and not OBJECTIVES[train.objective].by_token:
        text = f"{shared} with objective {train.objective}, whose loss needs whole rows; write sequence_parallel: 1"
        yield "train.sequence_parallel", text
    if train.activation_offload and train.activation_checkpointing is False:
        text = "false with activation_offload, which keeps the inputs of checkpointed layers on the host"
        yield "train.activation_checkpointing", f"{text}; write true or auto, or activation_offload: false"


def _impossible_validation(train: Train, data: Prepare | None) -> Iterable[RunMistake]:
    for key in ("patience", "stop_above") if train.validation_steps is None else ():
        if getattr(train, key):
            yield f"train.{key}", "needs validation_steps; write both, or neither"
    if train.validation_steps and data and not data.holds_out("validation"):
        text = f"{train.validation_steps}, but the data set has no validation rows; write its split.validation"
        yield "train.validation_steps", f"{text}, or remove it"


def _impossible_validation_tasks(config: Config, train: Train, data: Prepare | None) -> Iterable[RunMistake]:
    rows, key = config.tasks.rows, "train.validation_tasks"
    asked = [name for name, task in rows.items() if task.check not in TASKS or TASKS[task.check].ask != "loss"]
    remedy = f"write some of {', '.join(asked)}" if asked else "add a task with check: multiple_choice there"
    for name in train.validation_tasks:
        if train.validation_tasks.count(name) > 1:
            yield key, f"{name} occurs twice; write it once"
            return
        if name in config.tasks.harness:
            yield key, f"{name} is a task of lm-evaluation-harness, which runs only after training; {remedy}"
        elif name not in rows:
            yield key, f"{name} is not in tasks.rows; {remedy}"
        elif name not in asked:
            text = f"{name} has check {rows[name].check}, which asks for no answer"
            yield key, f"{text}; write another check there, or remove it here"
        elif train.sequence_parallel > 1 and rows[name].check != "multiple_choice":
            text = f"{name} has check {rows[name].check}, whose answers are generated on whole rows"
            yield key, f"{text}; write sequence_parallel: 1, or remove it here"
        elif name in ("loss", *OBJECTIVES[train.objective].of(train).metrics):
            yield key, f"{name}_validation is a column of loss.csv already; give the task another name"
    if train.validation_tasks and data and not data.holds_out("validation"):
        yield key, "the data set has no validation rows; write its split.validation, or remove the tasks"


def _impossible_kernels(settings: RunSections) -> Iterable[RunMistake]:
    train = settings.train
    if train.kernels == "liger" and settings.hardware.device == "cpu":
        yield "train.kernels", "liger with device cpu, for which Triton compiles no kernels; write auto or off"
    elif train.kernels == "liger" and train.compile:
        text = "liger with compile: true, which compiles the same operations"
        yield "train.kernels", f"{text}; write auto or off, or compile: false"
    if train.compile and TRAINABLE[train.method].quantizes():
        text = f"true with method {train.method}, whose quantized layers are not compiled"
        yield "train.compile", f"{text}; write false, or method: lora or dora"


def _impossible_method(train: Train, data: Prepare | None) -> Iterable[RunMistake]:
    method = TRAINABLE[train.method]
    quantizes, default = method.quantizes(), Quantization()
    if train.lora.init != DEFAULT_INIT and train.from_adapter and "lora" in method.sections:
        text = f"{train.lora.init}, but the factors start as those of {train.from_adapter}; write {DEFAULT_INIT}"
        yield "train.lora.init", text
    if train.quantization != default and not quantizes:
        key, value = next((key, value) for key, value in train.quantization if value != getattr(default, key))
        text = (
            f"{value} with method {train.method}, which quantizes nothing; write method: qlora or qdora, or remove it"
        )
        yield f"train.quantization.{key}", text
    if train.quantization.type == "int8" and train.method == "qdora":
        text = "int8 with method qdora, whose norms peft cannot compute before the first forward pass of an int8 module"
        yield "train.quantization.type", f"{text}; write nf4, or method: qlora"
    if train.lora.init != DEFAULT_INIT and quantizes:
        text = f"{train.lora.init} with method {train.method}, which cannot change quantized weights"
        yield "train.lora.init", f"{text}; write {DEFAULT_INIT}"
    if data and (data.add_special_tokens or data.add_tokens) and not method.trains_rows:
        text = f"{train.method}, which trains no rows of an embedding, but the data set adds tokens"
        yield "train.method", f"{text} (add_special_tokens, add_tokens); write lora, dora, qlora, qdora or full"


def _impossible_objective(train: Train) -> Iterable[RunMistake]:
    if OBJECTIVES[train.objective].reference:
        noise = "would be compared with a reference that nothing is drawn for"
        for section in TRAINABLE[train.method].sections:
            if dropout := getattr(getattr(train, section), "dropout", 0):
                text = f"{dropout} with objective {train.objective}, whose answers {noise}"
                yield f"train.{section}.dropout", f"{text}; write 0.0"
        if train.neftune_alpha:
            text = f"{train.neftune_alpha} with objective {train.objective}, whose answers {noise}"
            yield "train.neftune_alpha", f"{text}; write 0.0"
    if train.objective == "kto" and not (train.kto.desirable_weight or train.kto.undesirable_weight):
        text = "0.0, and so is undesirable_weight, so that the loss is 0; write more than 0.0 for one of them"
        yield "train.kto.desirable_weight", text
    if train.objective == "dpo":
        robust, share = train.dpo.loss == "robust", train.dpo.label_smoothing
        if robust and not share:
            text = "0.0 with loss robust, which needs the share of wrong labels; write a value between 0 and 0.5"
            yield "train.dpo.label_smoothing", f"{text}, e.g. 0.1, or loss: sigmoid"
        elif share and not robust:
            text = f"{share} with loss {train.dpo.loss}, which has none; write 0.0, or loss: robust"
            yield "train.dpo.label_smoothing", text


def _impossible_merge(settings: RunSections) -> Iterable[RunMistake]:
    if settings.merge.base == "dequantized" and not TRAINABLE[settings.train.method].quantizes():
        text = f"dequantized with method {settings.train.method}, which quantizes nothing"
        yield "merge.base", f"{text}; write original, or method: qlora or qdora"
    of_merged = [name for name in settings.export.targets if TARGETS[name].of_merged]
    if of_merged and not settings.merge.enabled:
        others = " and ".join(name for name, target in TARGETS.items() if not target.of_merged)
        text = f"{of_merged[0]} is made from the merged model, but merge.enabled is false; write merge.enabled: true"
        yield "export.targets", f"{text}, or of the targets {others}"


def _impossible_strategy(config: Config, run: str, settings: RunSections) -> Iterable[RunMistake]:
    try:
        user_config(settings.render.strategy)
    except UserError as error:
        yield "render.strategy", str(error)
        return
    try:
        rendered = stages_of(config, run).render
    except UserError as error:
        if settings.hardware.probe:  # a check's files are reported by _impossible_check
            yield "hardware.probe", str(error)
        return
    for key, table in (("gpu", GPUS), ("node_link", NODE_LINKS), ("network", NETWORKS)):
        value = getattr(settings.hardware, key)
        if value is not None and value not in table:
            yield f"hardware.{key}", f"{shown(value)} is not known; write one of {', '.join(offered(table))}"
            return
    try:
        hardware_of(rendered)
    except UserError as error:
        yield "hardware.probe" if rendered.hardware.probe else "hardware.gpu", str(error)
    name, target = settings.render.strategy, target_of(rendered)
    layouts = list(STRATEGIES.values())
    try:
        if rendered.user_config is not None:
            check_user_config(name, rendered.user_config, target)
            layouts = [layout_of(rendered.user_config).strategy]
        elif name != "auto":
            STRATEGIES[name].check(target)
            layouts = [STRATEGIES[name]]
    except UserError as error:
        for line in str(error).splitlines():
            yield "render.strategy", line.removeprefix("render.strategy: ").removeprefix("render.strategy is ")
        return
    conflicts = [OPTIMIZERS[settings.train.optimizer].conflict(layout, target) for layout in layouts]
    if all(conflicts) and (first := conflicts[0]):  # auto skips conflicting strategies
        yield "train.optimizer", f"{settings.train.optimizer}, and {first.problem}; {first.remedy}"


def _impossible_optimizer(train: Train) -> Iterable[RunMistake]:
    optimizer = OPTIMIZERS[train.optimizer]
    for key, default in (("betas", optimizer.betas), ("epsilon", optimizer.epsilon)):
        if getattr(train, key) is not None and default is None:
            yield f"train.{key}", f"{shown(getattr(train, key))}, but {optimizer.name} has none; remove it"
    if train.learning_rate_scaling not in (None, "none") and train.learning_rate_batch is None:
        text = f"{train.learning_rate_scaling} needs the global batch that learning_rate is for"
        yield "train.learning_rate_scaling", f"{text}; write learning_rate_batch: {train.global_batch}, or its value"
    if train.learning_rate_scaling is None and train.learning_rate_batch is not None:
        text = f"{train.learning_rate_batch} is used only with learning_rate_scaling"
        yield "train.learning_rate_batch", f"{text}; write learning_rate_scaling: linear, sqrt or none, or remove it"
    schedule, options = train.schedule, train.schedule_options
    steps, share = train.warmup_steps, train.warmup_ratio
    if steps is not None and share is not None:
        yield "train.warmup_steps", "conflicts with warmup_ratio; write one of the two"
    if schedule == ONE_CYCLE and "pct_start" in options and not steps is share is None:
        key = "warmup_ratio" if steps is None else "warmup_steps"
        yield "train.schedule_options", f"pct_start conflicts with {key}; write one of the two"
    elif fault := SCHEDULES[schedule].fault(options, peak_learning_rate(train)):
        yield "train.schedule_options", fault
    elif (
        train.max_steps
        and (steps is None or share is None)
        and (late := too_short(schedule, options, steps, share, train.max_steps))
    ):
        yield f"train.{late[0]}", late[1]


def _impossible_precision(settings: RunSections) -> Iterable[RunMistake]:
    hardware, precision = settings.hardware, settings.train.precision
    if hardware.device == "cpu" and precision == "fp16":
        yield "train.precision", "fp16 with device cpu, which DeepSpeed refuses; write auto, fp32 or bf16"
    if hardware.device == "cuda" and precision == "bf16" and device_precision(hardware) != "bf16":
        text = f"bf16 on a GPU of compute capability {hardware.compute_capability}, which has none; write auto or fp16"
        yield "train.precision", text
