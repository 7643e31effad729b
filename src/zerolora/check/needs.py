"""What the runs of a config need of the machines that they run on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zerolora.check.machine import WEIGHT_STORE
from zerolora.config.resolve import resolve
from zerolora.config.schema import Config
from zerolora.config.settings import HardwareSettings, RenderSettings, RunSettings
from zerolora.errors import UserError
from zerolora.files import MANIFEST, canonical, read_object
from zerolora.memory.estimate import training_spec
from zerolora.memory.predict import disk
from zerolora.memory.states import BYTES
from zerolora.memory.training_spec import RowStatistics
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import ModelSpec, with_rows
from zerolora.planner.machine_limits import strategy_of, uncompiled, uninstalled, uses_kernels, without_launchers
from zerolora.strategies import STRATEGIES
from zerolora.train.objectives import OBJECTIVES

ROWS = RowStatistics(
    packing=False,
    longest_packed_row=1,
    most_supervised=1,
    packed_rows=1,
    tokens=1,
    supervised_tokens=1,
    mean_row_of_a_token=1.0,
    validation_rows=0,
)
"""Rows for a prediction of disk space, which does not depend on them."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of each machine."""

    count: int
    memory: int
    """Bytes of one, as the config describes it."""
    capability: float
    """Compute capability, as the config describes it."""


@dataclass(frozen=True)
class Compiling:
    """What a run compiles when training starts."""

    what: str
    certain: bool
    """Whether it is compiled anyway, not only under a strategy that `auto` may choose."""
    fault: str | None
    """Why it cannot be compiled here."""


@dataclass(frozen=True)
class Needs:
    """The needs of all runs of a config together."""

    gpus: Gpus | None
    """None if everything computes on CPUs."""
    hardware: tuple[HardwareSettings, ...]
    """Each different description of machines with GPUs."""
    nodes: int
    host_memory: int
    """Bytes of one machine, as the config describes it."""
    compiling: tuple[Compiling, ...]
    uninstalled: Mapping[str, str]
    """Why each package is needed that this Python lacks."""
    written: Mapping[str, int]
    """Bytes that unfinished runs will write, by folder."""
    unknown: tuple[str, ...]
    """Models whose size is unknown until they are fetched."""
    unprepared: tuple[str, ...]
    """Data sets on which a teacher's probabilities have no size until they are prepared."""


def needs_of(config: Config) -> Needs:
    """Return the needs of a config's runs. Raises UserError if a file that the config names is unreadable."""
    runs = resolve(config).runs
    planned = [run.render for run in runs.values()]
    written, unknown = _written(config, runs)
    of_teachers, unprepared = _taught(runs)
    for folder in ("results", ".dvc/cache") if of_teachers else ():
        written[folder] = written.get(folder, 0) + of_teachers
    return Needs(
        gpus=_gpus(planned),
        hardware=tuple({canonical(each.hardware.model_dump()): each.hardware for each in _on_gpus(planned)}.values()),
        nodes=max((each.nodes for each in planned), default=1),
        host_memory=max((each.host_memory for each in planned), default=0),
        compiling=tuple(_compiling(planned)),
        uninstalled={package: why for each in planned for package, why in uninstalled(each).items()},
        written=written,
        unknown=unknown,
        unprepared=unprepared,
    )


def _on_gpus(planned: Iterable[RenderSettings]) -> list[RenderSettings]:
    return [each for each in planned if each.device == "cuda"]


def _gpus(planned: Iterable[RenderSettings]) -> Gpus | None:
    runs = _on_gpus(planned)
    if not runs:
        return None
    return Gpus(
        count=max(each.ranks_per_node for each in runs),
        memory=max(each.gpu_memory or 0 for each in runs),
        capability=max(each.hardware.compute_capability or 0.0 for each in runs),
    )


def _compiling(planned: Iterable[RenderSettings]) -> Iterable[Compiling]:
    compiling: dict[tuple[str, str], Compiling] = {}
    for run in planned:
        certain = run.strategy != "auto"
        names = [run.strategy] if certain else ["zero3_nvme"] if run.nvme else []
        for strategy in (strategy_of(run, name) if certain else STRATEGIES[name] for name in names):
            if strategy.compiled:
                what = f"{', '.join(strategy.compiled)} ({strategy.name})"
                fault = next(uncompiled(strategy, run.device), None)
                compiling.setdefault((what, run.device), Compiling(what, certain, fault))
        if uses_kernels(run):
            what = "Triton's kernels (train.kernels)"
            compiling.setdefault((what, run.device), Compiling(what, True, next(without_launchers(run), None)))
    return compiling.values()


def _written(config: Config, runs: Mapping[str, RunSettings]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the bytes that unfinished runs will write by folder, and the models of unknown size."""
    written = dict.fromkeys(("results", "work", WEIGHT_STORE, ".dvc/cache"), 0)
    teachers = {run.teacher.model for run in runs.values() if run.teacher}
    specs = {name: _spec(config, name) for name in {each.model for each in config.prepare.values()} | teachers}
    local = set(config.fetch.directory)
    used: set[str] = set()
    unfetched: dict[str, int] = {}
    terms: dict[str, dict[str, int]] = {}
    for name, run in runs.items():
        if run.dataset not in config.prepare or Path("results", name, "adapter", MANIFEST).is_file():
            continue
        model = config.prepare[run.dataset].model
        used.add(model)
        if run.teacher and not _is_computed(run):
            used.add(run.teacher.model)
            if teacher := specs[run.teacher.model]:
                size = teacher.stored_bytes or teacher.parameters * BYTES[run.teacher.precision]
                unfetched[run.teacher.model] = max(size, unfetched.get(run.teacher.model, 0))
        spec = specs[model]
        if spec is None:
            continue
        key = f"{model} {canonical(run.estimate.model_dump(mode='json'))} {run.render.strategy}"
        terms[key] = terms.get(key) or _disk(spec, run.render)
        bytes_ = terms[key]
        versioned = bytes_["adapter"] + (bytes_["merged"] if run.merge.version else 0)
        written["results"] += versioned
        written[".dvc/cache"] += versioned
        written["work"] += bytes_["checkpoints"] + (0 if run.merge.version else bytes_["merged"])
        if run.render.nvme and bytes_["nvme"]:
            written[run.render.nvme] = max(written.get(run.render.nvme, 0), bytes_["nvme"])
        unfetched[model] = max(bytes_["model"], unfetched.get(model, 0))
    here = local | {model for model in unfetched if Path("resources/weights", model).is_dir()}
    written[WEIGHT_STORE] = sum(size for model, size in unfetched.items() if model not in here)
    unknown = sorted(model for model in used if specs[model] is None)
    return {folder: size for folder, size in written.items() if size}, tuple(unknown)


def _taught(runs: Mapping[str, RunSettings]) -> tuple[int, tuple[str, ...]]:
    """Return the bytes of the teachers' probabilities that are still to be computed, once for all runs that share them,
    and the data sets of which they are unknown."""
    size, unprepared = 0, set()
    shared = {run.taught: run for run in runs.values() if run.teacher and not _is_computed(run)}
    for run in shared.values():
        assert run.teacher
        stats = Path("results/data", run.dataset, "stats.json")
        if not stats.is_file():
            unprepared.add(run.dataset)
            continue
        counts = read_object(stats, "zerolora stage prepare")
        tokens = sum(counts[f"{split}_supervised_tokens"] for split in ("train", "validation"))
        size += OBJECTIVES[run.train.objective].configured({"top_k": run.teacher.top_k}).row_bytes(tokens)
    return size, tuple(sorted(unprepared))


def _is_computed(run: RunSettings) -> bool:
    return Path("results", run.taught, "teacher", MANIFEST).is_file()


def _spec(config: Config, model: str) -> ModelSpec | None:
    """Return the specification of a base model; None if its config.json is not here yet."""
    named = config.fetch.directory.get(model)
    directory = Path(named.path) if named else Path("resources/models", model)
    return read_model_spec(directory) if (directory / "config.json").is_file() else None


def _disk(model: ModelSpec, settings: RenderSettings) -> dict[str, int]:
    """Return the terms of the disk space of a run; only the states on an NVMe disk depend on the strategy."""
    spec = training_spec(with_rows(model, settings.added_tokens), settings, ROWS)
    named = settings.strategy if settings.strategy in STRATEGIES else "zero3_nvme" if settings.nvme else spec.strategy
    try:
        return disk(with_rows(model, settings.added_tokens), replace(spec, strategy=named))
    except UserError:  # render names what of the model cannot be trained
        return dict.fromkeys(("model", "adapter", "checkpoints", "merged", "nvme"), 0)
