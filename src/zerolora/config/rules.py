"""Checks for config values that are valid by themselves but not in combination."""

from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from zerolora.config.messages import remedy
from zerolora.config.resolve import device_precision, models_by_source, run_sections, stages_of, user_config
from zerolora.config.schema import HUB_DATA, RESERVED_RUNS, Config, RunSections
from zerolora.errors import UserError, shown
from zerolora.planner.datasheets import GPUS, NETWORKS, NODE_LINKS
from zerolora.planner.run_hardware import hardware_of, target_of
from zerolora.planner.user_config import check_user_config
from zerolora.strategies import STRATEGIES

Mistake = tuple[tuple[str, ...], str]


def impossible(config: Config) -> Iterable[Mistake]:
    """Yield (location, message) for values that are valid by themselves but not in combination."""
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
            yield (
                ("prepare", name, "model"),
                f"{shown(data.model)} is not in fetch; write one of {', '.join(owners) or 'none: add it there'}",
            )
        yield from _impossible_data(config, name)
    for name, run in config.runs.items():
        if name in RESERVED_RUNS:
            yield ("runs", name), f"results/{name}/ is taken by another stage; choose another name"
        if run.dataset not in config.prepare:
            dangling = True
            yield (
                ("runs", name, "dataset"),
                f"{shown(run.dataset)} is not a data set of prepare; write one of {', '.join(config.prepare)}",
            )
        yield from _impossible_in(config, name)
    if not dangling:  # otherwise a misspelt name would be reported twice
        yield from _unused(config)


def _impossible_data(config: Config, name: str) -> Iterable[Mistake]:
    data = config.prepare[name]
    here = ("prepare", name)
    for split in ("validation", "test"):
        if getattr(data.split, split) == 0 and not any(source.split == split for source in data.sources.values()):
            yield (*here, "split", split), f"0 rows, and no source is the {split} split; write 1 or more"
    weighed = any(source.weight for source in data.sources.values())
    for key, source in data.sources.items():
        at = (*here, "sources", key)
        if Path(key).is_absolute() or ".." in Path(key).parts:
            yield at, f"leads out of {data.path}; name a file or folder below it"
        if source.weight and source.rows:
            yield (*at, "weight"), "stands beside rows; write one of the two"
        if source.split in ("validation", "test") and (source.weight or source.rows):
            yield at, f"is the {source.split} split, which is taken whole; remove weight and rows"
        elif weighed and not source.weight and not source.rows and source.split in (None, "train"):
            yield at, "has no weight, but other sources have; give it a weight or rows"


def _unused(config: Config) -> Iterable[Mistake]:
    used_models = {data.model for data in config.prepare.values()}
    used_data = {run.dataset for run in config.runs.values()}
    for source, models in models_by_source(config):
        for name in models:
            if name not in used_models:
                yield ("fetch", source, name), "no data set uses this model; name it in prepare, or remove it"
    for name in config.fetch.data:
        folder = Path(HUB_DATA) / name
        paths = [Path(data.path) for data in config.prepare.values()]
        if not any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in paths):
            yield (
                ("fetch", "data", name),
                f"no data set's path is {folder} or a folder of it; write that in prepare, or remove it",
            )
    for name in config.prepare:
        if name not in used_data:
            yield ("prepare", name), "no run uses this data set; name it in a run's dataset, or remove it"


def _impossible_in(config: Config, run: str) -> Iterable[Mistake]:
    try:
        settings = run_sections(config, run)
    except ValidationError as error:
        for mistake in error.errors():
            where = tuple(str(part) for part in mistake["loc"])
            yield ("runs", run, *where), remedy(mistake)
        return
    hardware, train = settings.hardware, settings.train

    def at(part: str, key: str) -> tuple[str, ...]:
        return ("runs", run, part, key) if key in getattr(config.runs[run], part) else (part, key)

    ranks = train.nodes * train.ranks_per_node
    if hardware.device == "cuda" and train.ranks_per_node > hardware.gpus_per_node:
        yield (
            at("train", "ranks_per_node"),
            f"{train.ranks_per_node} ranks on a node of {hardware.gpus_per_node} GPUs (hardware.gpus_per_node); "
            f"write {hardware.gpus_per_node} or less",
        )
    if train.nodes > hardware.nodes:
        yield (
            at("train", "nodes"),
            f"{train.nodes} nodes of {hardware.nodes} (hardware.nodes); write {hardware.nodes} or less",
        )
    elif train.micro_batch == "auto" and train.global_batch % ranks:
        yield (
            at("train", "global_batch"),
            f"{train.global_batch} is not a multiple of {ranks} ranks; write a multiple of {ranks}",
        )
    elif train.micro_batch != "auto" and train.global_batch % (train.micro_batch * ranks):
        yield (
            at("train", "global_batch"),
            f"{train.global_batch} is not a multiple of micro_batch {train.micro_batch} x {ranks} ranks; "
            f"write a multiple of {train.micro_batch * ranks}",
        )
    if train.patience and not train.validation_steps:
        yield at("train", "patience"), "has nothing to count without validation_steps; write both, or neither"
    yield from _impossible_strategy(config, run, settings, at)
    if hardware.device == "cpu" and train.precision == "fp16":
        yield (
            at("train", "precision"),
            "fp16 with device cpu, which DeepSpeed refuses; write auto, fp32 or bf16",
        )
    if hardware.device == "cuda" and train.precision == "bf16" and device_precision(hardware) != "bf16":
        yield (
            at("train", "precision"),
            f"bf16 on a GPU of compute capability {hardware.compute_capability}, which has none; write auto or fp16",
        )


def _impossible_strategy(
    config: Config, run: str, settings: RunSections, at: Callable[[str, str], tuple[str, ...]]
) -> Iterable[Mistake]:
    try:
        user_config(settings.render.strategy)
    except UserError as error:
        yield at("render", "strategy"), str(error)
        return
    try:
        rendered = stages_of(config, run).render
    except UserError as error:  # the probe is the other file that settings name
        yield at("hardware", "probe"), str(error)
        return
    for key, table in (("gpu", GPUS), ("node_link", NODE_LINKS), ("network", NETWORKS)):
        value = getattr(settings.hardware, key)
        if value is not None and value not in table:
            yield at("hardware", key), f"{shown(value)} is not known; write one of {', '.join(table)}"
            return
    try:
        hardware_of(rendered)
    except UserError as error:
        yield at("hardware", "probe" if rendered.hardware.probe else "gpu"), str(error)
    name, target = settings.render.strategy, target_of(rendered)
    try:
        if rendered.user_config is not None:
            check_user_config(name, rendered.user_config, target)
        elif name != "auto":
            STRATEGIES[name].check(target)
    except UserError as error:
        for line in str(error).splitlines():
            yield at("render", "strategy"), line.removeprefix("render.strategy: ").removeprefix("render.strategy is ")
