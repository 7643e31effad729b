"""Checks of adapters that runs read: of `train.from_adapter`, where it is allowed, and that a run can load the adapter
that it continues from; and of a teacher's."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from zerolora.config.grid_rules import location_of
from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.config.resolve import models_by_source, run_sections
from zerolora.config.run_objectives import needs_reference, reference_adapter, reference_key, teacher_of
from zerolora.config.schema import Config, Train
from zerolora.config.section import Fault
from zerolora.config.values import HUB_ADAPTERS, RUN_ADAPTER
from zerolora.errors import shown
from zerolora.methods.registry import TRAINABLE

TENSOR_KEYS = ("modules_to_save", "targets")
"""Keys of a method's section that decide which tensors exist."""
MOST_LISTED = 10  # names in a message


def impossible_origin(config: Config, run: str) -> Iterable[Fault]:
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
        yield here[:2], f"needs an adapter; set train: {{from_adapter: {example}}}, or move the run to runs"
        return
    seen = [run]
    while (match := RUN_ADAPTER.fullmatch(start)) and match[1] in config.all_runs:
        if match[1] in seen:
            yield here, f"{start} continues from {' and '.join(seen)} itself; name another adapter"
            return
        seen.append(match[1])
        start = str(config.all_runs[match[1]].train.get("from_adapter") or "")
    if start.startswith("results/"):
        listed = ", ".join(_other_adapters(config, run, seen))
        yield here, f"{shown(start)} is not a run's adapter; use one of {listed}"
    elif Path(start).is_relative_to(HUB_ADAPTERS) and Path(start).name not in config.fetch.adapter:
        yield here, f"{shown(start)} is not fetched; add {Path(start).name} to fetch.adapter"


def impossible_reference(config: Config, run: str) -> Iterable[Fault]:
    """Yield a reference that is no adapter of the project."""
    if not needs_reference(config, run) or (adapter := reference_adapter(config, run)) is None:
        return
    here = location_of(config, run, "train", *reference_key(config, run))
    if Path(adapter).is_relative_to("results"):
        match = RUN_ADAPTER.fullmatch(adapter)
        if match is None or match[1] not in config.all_runs:
            listed = ", ".join(_other_adapters(config, run, [run]))
            yield here, f"{shown(adapter)} is not a run's adapter; use start, or one of {listed}"
        elif match[1] == run:
            yield here, f"{run} would compare with itself; use start, or the name of an earlier run"
    elif Path(adapter).is_relative_to(HUB_ADAPTERS) and Path(adapter).name not in config.fetch.adapter:
        yield here, f"{shown(adapter)} is not fetched; add {Path(adapter).name} to fetch.adapter"


def impossible_teacher(config: Config, run: str) -> Iterable[Fault]:
    """Yield mistakes in the teacher of a run: an unknown model, an adapter of another model, or of a run that is taught
    by this one."""
    teacher = teacher_of(config, run)
    if teacher is None:
        return
    objective = str(config.all_runs[run].train.get("objective", config.train.objective))
    own = config.all_runs[run].train.get(objective)

    def here(key: str) -> tuple[str, ...]:
        path = ("train", objective, key)
        return location_of(config, run, *path) if isinstance(own, dict) and key in own else path

    known = [name for _, models in models_by_source(config) for name in models]
    if teacher.model not in known:
        yield here("teacher"), f"{shown(teacher.model)} is not in fetch; use one of {', '.join(known)}"
    if teacher.run is None:
        if teacher.adapter and Path(teacher.adapter).name not in config.fetch.adapter:
            name = Path(teacher.adapter).name
            yield here("adapter"), f"{shown(teacher.adapter)} is not fetched; add {name} to fetch.adapter"
        return
    if teacher.run not in config.all_runs:
        listed = ", ".join(_other_adapters(config, run, [run]))
        yield here("adapter"), f"{shown(teacher.adapter)} is not a run's adapter; use one of {listed}"
        return
    if run in _origins(config, teacher.run):
        yield here("adapter"), f"{teacher.run} is trained with {run} itself; name the adapter of another run"
    dataset = config.all_runs[teacher.run].dataset
    if dataset in config.prepare and (model := config.prepare[dataset].model) != teacher.model:
        text = f"{shown(teacher.adapter)} is an adapter of {model}, and the teacher is {teacher.model}"
        yield here("adapter"), f"{text}; use teacher: {model}, or another adapter"


def _origins(config: Config, run: str) -> set[str]:
    """Return a run, and all runs whose adapters it is trained with."""
    seen: set[str] = set()
    waiting = [run]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in config.all_runs:
            continue
        seen.add(name)
        if match := RUN_ADAPTER.fullmatch(str(config.all_runs[name].train.get("from_adapter") or "")):
            waiting.append(match[1])
        if (teacher := teacher_of(config, name)) and teacher.run:
            waiting.append(teacher.run)
    return seen


def _other_adapters(config: Config, run: str, seen: list[str]) -> list[str]:
    """Return the adapters of other runs than `seen` and than those of the run's grid, a few of them."""
    owner = config.expanded_runs.get(run)
    same = config.names_by_owner[owner.section, owner.owner] if owner else []
    others = [f"results/{name}/adapter" for name in config.all_runs if name not in same and name not in seen]
    return [*others[:MOST_LISTED], "..."] if len(others) > MOST_LISTED else others


def unlike_origin(config: Config, run: str) -> Iterable[Fault]:
    """Yield settings of a run that conflict with those of the run that it continues from."""
    start = config.all_runs[run].train.get("from_adapter")
    adapter = RUN_ADAPTER.fullmatch(start) if config.is_continued(run) and isinstance(start, str) else None
    if not adapter or adapter[1] not in config.all_runs or adapter[1] == run:
        return
    origin = adapter[1]
    try:
        train, theirs = (run_sections(config, each).train for each in (run, origin))
    except ValidationError:  # reported by impossible_run
        return
    for key, text in _another_adapter(train, theirs, f"results/{origin}/adapter"):
        own = key[0] in config.all_runs[run].train
        yield location_of(config, run, "train", *key) if own else ("train", *key), text
    yield from _other_data(config, run, origin)


def _another_adapter(train: Train, theirs: Train, adapter: str) -> Iterator[Fault]:
    """Yield each setting with which `train` builds an adapter that cannot load the one of `theirs`."""
    method, other = TRAINABLE[train.method], TRAINABLE[theirs.method]
    if (method.peft_type, method.options) != (other.peft_type, other.options):
        text = f"{train.method}, but {adapter} was trained with {theirs.method}; use {theirs.method}"
        yield ("method",), text
        return
    for section in method.sections:
        for key in TENSOR_KEYS:
            values = [getattr(getattr(each, section), key, None) for each in (train, theirs)]
            ours, expected = (sorted(set(each)) if isinstance(each, list) else each for each in values)
            if ours != expected:
                text = f"{shown(ours)}, but that of {adapter} is {shown(expected)}; set {key}: {shown(expected)}"
                yield (section, key), text
    built, published = method.identity(train), method.identity(theirs, published=True)
    for name, expected in published.items():
        if built[name] != expected:
            path = tuple(method.meaning[name].split("."))
            text = f"{shown(built[name])}, but that of {adapter} is {shown(expected)}"
            if "lora" in method.sections and theirs.lora.init != DEFAULT_INIT:
                text += f" (with init {theirs.lora.init}, it has twice the rank)"
            yield path, f"{text}; set {path[-1]}: {shown(expected)}"


def _other_data(config: Config, run: str, origin: str) -> Iterable[Fault]:
    """Yield another base model or other added tokens than those that the adapter was trained with."""
    names = [config.all_runs[each].dataset for each in (run, origin)]
    if any(name not in config.prepare for name in names):  # reported elsewhere
        return
    data, theirs = (config.prepare[name] for name in names)
    adapter = f"{run} continues from results/{origin}/adapter"
    models = {name: model for _, models in models_by_source(config) for name, model in models.items()}
    if data.model != theirs.model and models.get(data.model) != models.get(theirs.model):
        text = f"{data.model}, but {adapter}, whose base is {theirs.model}"
        yield ("prepare", names[0], "model"), f"{text}; use {theirs.model}, or another data set in {run}"
    for key in ("add_special_tokens", "add_tokens"):
        actual, expected = getattr(data, key), shown(getattr(theirs, key))
        if actual != getattr(theirs, key):
            text = f"{shown(actual)}, but {adapter}, which was trained with {expected}"
            yield ("prepare", names[0], key), f"{text}; set {key}: {expected}"
