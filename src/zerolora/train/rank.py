"""One rank: load, adapt, train, save. launcher.py starts it through __main__.py; the main path is `train`."""

import argparse
import contextlib
import copy
import csv
import gc
import importlib
import io
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed
import transformers

from zerolora.compat import bitsandbytes_patches
from zerolora.config.objective_sections import START, WithReference
from zerolora.config.settings import TrainingPlan, TrainSettings
from zerolora.data.packing_plan import PackingPlan, open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.data.reference_columns import with_reference
from zerolora.errors import EXPECTED, UserError, explained, message_of
from zerolora.files import MANIFEST, read_json, write_json, write_text
from zerolora.log import LOGGER, result, set_up
from zerolora.machine import cpu_matmul, devices
from zerolora.machine.identity import computing
from zerolora.machine.peak_memory import PeakMemory
from zerolora.methods.registry import TRAINABLE
from zerolora.model import added_tokens, foreign
from zerolora.model.manifest import base_identity, located
from zerolora.model.padded_lengths import step_of
from zerolora.model.prompt_format import write_adapter_format
from zerolora.model.spec import FEWEST
from zerolora.model.stored_quantization import stored_precision
from zerolora.model.weight_files import few
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.zero_json import ZeroJson
from zerolora.schedules import every
from zerolora.train import common_prefix, earlier_adapter, kernels, schedule
from zerolora.train.adapter import adapt, base_of, expected_tensors, method_of, save, starts_from_base
from zerolora.train.base_model import loading_of
from zerolora.train.checkpoint.resume_key import resume_key, run_fingerprint
from zerolora.train.checkpoint.store import Checkpoints
from zerolora.train.engines import engine_class
from zerolora.train.engines.engine import Engine, Tensors
from zerolora.train.feed import Batches, padding, prepared
from zerolora.train.isolation import (
    check_kernels,
    check_length,
    check_loss,
    check_reference,
    check_sequence_parallel,
    isolate,
    shares_prefixes,
)
from zerolora.train.launch.fork import become_rank
from zerolora.train.launch.heartbeat import Heartbeat
from zerolora.train.launch.rendezvous import check_own_gpu
from zerolora.train.launch.stop_signals import STOPPED, Stop, Stopped
from zerolora.train.launch.topology import gpu_of_rank
from zerolora.train.loop import Loop
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.objectives.objective import Objective
from zerolora.train.rope_by_row import compute_by_row
from zerolora.train.sequence_parallel import sequence
from zerolora.train.starting_factors import extract
from zerolora.train.teacher_columns import with_teacher
from zerolora.train.telemetry.stopwatch import Collectives, Stopwatch
from zerolora.train.telemetry.trackers import TrackedRun
from zerolora.train.telemetry.writer import FILE, TelemetryWriter
from zerolora.train.validation_tasks import ValidationTasks, files_of, tasks_of


@dataclass(frozen=True)
class Paths:
    """Files and directories of one training."""

    data: Path
    packing: Path
    zero: Path
    """results/<run>/zero.json."""
    weights: Path
    """The file that locates the base weights."""
    checkpoints: Path
    """Directory of the run's checkpoints."""
    output: Path
    tasks: Path = Path("results/tasks")
    """Directory of the rows of validation tasks."""
    reference: Path | None = None
    """Directory with the log-probabilities of the data's answers, for an objective that compares with them."""
    teacher: Path | None = None
    """Directory with a teacher's probabilities, for an objective that compares with these."""

    def rows(self, split: str, objective: Objective) -> Any:
        """Return a split of the data, with these columns, and with those that the objective derives."""
        rows = open_split(self.data, split)
        if self.reference:
            rows = with_reference(rows, self.data, self.reference, split)
        if self.teacher:
            rows = with_teacher(rows, self.data, self.teacher, split, objective)
        return prepared(rows, objective)


def train(
    settings: TrainSettings, paths: Paths, keep_checkpoints: int, losses_only: bool, no_kernels: bool = False
) -> None:
    """Train one adapter and write `output`/adapter, metrics/train.json, train_resources.json, loss.csv, telemetry.csv.

    Resumes from the run's newest checkpoint, if there is one. Collective: every rank calls it; rank 0 writes. With
    `losses_only` it writes `output`/telemetry.csv alone, without validation; with `no_kernels` it uses none of
    liger-kernel, whatever zero.json says. Raises Stopped on a stop signal, with everything saved, and UserError if the
    device is not the config's, packed rows would see each other, a loss is not finite, or the finished adapter is
    incomplete.
    """
    process = _join(settings, paths, no_kernels)
    data = _open_data(process.plan, paths, losses_only)
    checkpoints = _checkpoints(process, data, paths, keep_checkpoints)
    if not losses_only:  # a canary makes the first steps of a run
        schedule.check(process.plan, data.batches.steps)
    adapted = _build(process, paths, checkpoints)
    loop = _loop(process, data, adapted.engine, paths, checkpoints)
    _resume(loop)
    _run(loop, data, paths, validates=not losses_only)
    if losses_only:
        _publish_losses(loop, paths)
    else:
        _publish(loop, process, adapted, paths)
    torch.distributed.barrier()
    process.heartbeat.close()
    adapted.engine.close()


@dataclass(frozen=True)
class RankProcess:
    """This rank in the process group: its plan, its device, and what measures and watches it."""

    plan: TrainingPlan
    config: ZeroJson
    device: torch.device
    stopwatch: Stopwatch
    collectives: Collectives
    memory: PeakMemory
    stop: Stop
    heartbeat: Heartbeat
    started: float
    """time.monotonic() at the start."""


def _join(settings: TrainSettings, paths: Paths, no_kernels: bool) -> RankProcess:
    """Claim this rank's device and join the process group. Collective."""
    started, stop, heartbeat = time.monotonic(), Stop(), Heartbeat()
    plan, config = read_plan(settings, paths.zero, no_kernels)
    config = _own_folders(config, paths.checkpoints.name)
    device = claim_device(plan)
    stopwatch = Stopwatch(device)
    collectives = Collectives(stopwatch)
    collectives.watch()  # before the engines keep torch's functions
    _connect(plan, config, device)
    sequence.set(plan.sequence_parallel)
    memory = PeakMemory(device)
    heartbeat.at("loading")
    return RankProcess(plan, config, device, stopwatch, collectives, memory, stop, heartbeat, started)


@dataclass(frozen=True)
class TrainingData:
    """The rows of a training, and the tasks at its validations."""

    batches: Batches
    validation: Any
    """The validation split."""
    packing: PackingPlan
    """Its packed rows."""
    tasks: ValidationTasks
    task_files: dict[str, Path]
    """The file with the rows of each task, by name."""


def _open_data(plan: TrainingPlan, paths: Paths, losses_only: bool) -> TrainingData:
    """Open the rows of this rank; with `losses_only` without tasks."""
    files = {} if losses_only else files_of(plan, paths.tasks)
    tasks = tasks_of(plan, files, paths.data, located(paths.weights))
    batches = _batches(paths, plan)
    validation = paths.rows("validation", batches.objective)
    return TrainingData(batches, validation, open_plan(paths.packing / "validation.arrow"), tasks, files)


def _checkpoints(process: RankProcess, data: TrainingData, paths: Paths, keep: int) -> Checkpoints:
    """Return the run's checkpoints, of which those with another key are not resumed from."""
    plan, batches = process.plan, data.batches
    beside = {name: path for name in ("reference", "teacher") if (path := getattr(paths, name))}
    return Checkpoints(
        paths.checkpoints,
        resume_key(plan, process.config, paths.data, paths.packing, paths.weights, data.task_files, beside),
        run_fingerprint(plan, process.config, batches.steps),
        every_steps=None if plan.checkpoint_steps is None else every(plan.checkpoint_steps, batches.planned),
        every_minutes=plan.checkpoint_minutes,
        keep=keep,
    )


@dataclass(frozen=True)
class AdaptedModel:
    """The base model with trained parameters, in an engine."""

    engine: Engine
    start: Tensors
    """The factors that the adapter starts with, if they are of the base weights."""
    origin: dict[str, Any] | None
    """The provenance of the adapter that training continues from."""


def _build(process: RankProcess, paths: Paths, checkpoints: Checkpoints) -> AdaptedModel:
    """Load the base model, add the parameters to train with their first values, and wrap it in the engine."""
    plan, config, device = process.plan, process.config, process.device
    tokens = added_tokens.of_data(paths.data)
    model = adapt(located(paths.weights), plan, config, device, tokens)
    start = _starting_factors(model, plan, config, checkpoints, device)
    earlier = Path(plan.from_adapter) if plan.from_adapter else None
    origin = earlier_adapter.load(model, earlier, method_of(plan), tokens) if earlier else None
    engine = engine_class(plan.engine)(model, config, plan, device)
    gc.freeze()  # so that collections skip everything loaded by now; __main__.py turned them off
    gc.enable()
    process.heartbeat.follow(engine.module, device)
    return AdaptedModel(engine, start, origin)


def _loop(process: RankProcess, data: TrainingData, engine: Engine, paths: Paths, checkpoints: Checkpoints) -> Loop:
    """Check the model on the device, and return the loop that trains it. Collective."""
    plan, device = process.plan, process.device
    stats = read_json(paths.packing / "stats.json", "zerolora stage pack")
    longest = read_json(paths.data / "stats.json", "zerolora stage prepare")["longest_row"]
    prefixes = _check_model(engine, plan, stats, longest, device)
    return Loop(
        engine,
        data.batches,
        plan,
        packed=stats["packing"],
        prefixes=prefixes,
        sources=_sources(paths.data),
        device=device,
        checkpoints=checkpoints,
        telemetry=TelemetryWriter(engine, data.batches, process.stopwatch, process.collectives, plan),
        stop=process.stop,
        heartbeat=process.heartbeat,
        tasks=data.tasks,
    )


def _run(loop: Loop, data: TrainingData, paths: Paths, validates: bool) -> None:
    """Train until the end, which `validates` unless the last step did. Collective."""
    with loop.telemetry:
        if loop.rank == 0:
            _open_telemetry(loop, paths)
        loop.run(data.validation, data.packing)
        if len(data.validation) and validates and not loop.validations.has(loop.step):
            loop.validate(data.validation, data.packing)
    loop.validations.check()
    loop.batches.end_after(loop.step)


def _publish_losses(loop: Loop, paths: Paths) -> None:
    """Write the telemetry alone, for a canary."""
    loop.checkpoints.wait()
    if loop.rank == 0:
        loop.telemetry.publish(paths.output / FILE)


def _resume(loop: Loop) -> None:
    """Resume a loop, or check the reference that a new training compares with, unless it is another model's, of which
    the stage has checked name and hashes (beginning.py)."""
    loop.resume()
    section = getattr(loop.plan, loop.plan.objective, None)
    if isinstance(section, WithReference) and section.reference == START and not loop.step:
        check_reference(loop.engine, loop.feed, loop.device)


def _starting_factors(
    model: Any, plan: TrainingPlan, config: ZeroJson, checkpoints: Checkpoints, device: torch.device
) -> Tensors:
    """Return the factors that the adapter starts with, if they are of the base weights. Collective."""
    if not starts_from_base(plan):
        return {}
    sharded = loading_of(plan, config, engine_class(plan.engine)) == "sharded"
    return extract(model, plan, checkpoints, sharded, device)


def _open_telemetry(loop: Loop, paths: Paths) -> None:
    # Beside work/checkpoints/<run>: work/tracking/<run>.
    folder = paths.checkpoints.parent.parent / "tracking" / paths.checkpoints.name
    tracker = TrackedRun(loop.plan.tracker, folder, loop.plan.model_dump(mode="json"))
    loop.telemetry.open(loop.checkpoints.folder / FILE, loop.history(), tracker)


def _publish(loop: Loop, process: RankProcess, adapted: AdaptedModel, paths: Paths) -> None:
    """Write adapter and metrics of a finished loop. Collective. Raises UserError if the adapter is incomplete."""
    plan, start, origin = process.plan, adapted.start, adapted.origin
    loop.stop_if_asked()
    loop.heartbeat.at("writing the adapter")
    tokens = added_tokens.of_data(paths.data)
    base = located(paths.weights)
    expected = expected_tensors(base, plan, tokens, plan.without_gradient)
    output, best = paths.output / "adapter", loop.validations.best

    def carry(staged: Path) -> None:
        write_adapter_format(paths.data, base, staged, tokens=tokens)
        _check_launcher(loop)

    identity, was = base_identity(paths.weights), stored_precision(base)
    with _resumable():
        save(loop.engine, plan, output, loop.rank, expected, best, start, identity, origin, tokens, carry, was)
    peaks, energy = process.memory.of_all_ranks(), loop.telemetry.energy.of_all_ranks()
    loop.checkpoints.wait()  # its size is known then
    if loop.rank == 0:
        _check_launcher(loop)
        published = sum(shape.numel() for shape in expected.values())
        trainable = published - sum(tensor.numel() for tensor in start.values())
        measured = peaks | ({} if energy is None else {"energy_joules": energy})
        with _resumable():
            seconds = time.monotonic() - process.started
            _write_metrics(paths.output / "metrics", loop, trainable, paths, measured, seconds)
        loop.checkpoints.mark_finished()


def _check_launcher(loop: Loop) -> None:
    """Raise Stopped if the launcher has ended: a result published now would be that of a failed stage."""
    if loop.stop.orphaned:
        raise Stopped("the process that started this training has ended; nothing is published")


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """Turn errors of the operating system, such as a full disk, into UserErrors: the last checkpoint is on disk."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{explained(error)}; the same command then resumes from the last checkpoint") from None


def read_plan(settings: TrainSettings, zero: Path, no_kernels: bool = False) -> tuple[TrainingPlan, ZeroJson]:
    """Return the training plan and the engine's options. Raises UserError if `render` did not write the file."""
    config = ZeroJson.read(zero)
    plan = TrainingPlan.of(settings, config.choice)
    return plan.model_copy(update={"kernels": "off"}) if no_kernels else plan, config


def _own_folders(config: ZeroJson, run: str) -> ZeroJson:
    """Return options with a folder for each run on the offload disk: DeepSpeed names files by rank alone, so two runs
    on a machine would read each other's."""
    options = copy.deepcopy(config.options)
    for section in ("offload_param", "offload_optimizer"):
        offload = options.get("zero_optimization", {}).get(section) or {}
        if offload.get("nvme_path"):
            offload["nvme_path"] = str(Path(offload["nvme_path"]) / run)
    return ZeroJson(options=options, choice=config.choice)


def _batches(paths: Paths, plan: TrainingPlan) -> Batches:
    """Return the batches of this rank, and with train.compile set their lengths; ranks that share rows count as one."""
    stats = read_json(paths.packing / "stats.json", "zerolora stage pack")
    if plan.compile:
        padding.step = step_of(stats["longest_packed_row"])
    rank, world, shared = torch.distributed.get_rank(), torch.distributed.get_world_size(), plan.sequence_parallel
    rows, packing = paths.rows("train", OBJECTIVES[plan.objective].of(plan)), open_plan(paths.packing / "train.arrow")
    return Batches(rows, packing, plan, rank // shared, world // shared, stats["packing"])


def _check_model(engine: Engine, plan: TrainingPlan, stats: dict[str, Any], longest: int, device: torch.device) -> bool:
    """Return whether a prefix that rows share can be computed once; `stats` are those of the packing, `longest` the
    tokens of the longest row. Raises UserError if packed rows would see each other, if a row has other logits beside
    others than alone, or if ranks that share rows compute other logits."""
    packed, alike, first = stats["packing"], stats.get("train_common_prefix", 0), torch.distributed.get_rank() == 0
    base = base_of(engine.module)
    by_row = compute_by_row(base, longest)
    if kernels.in_use(base):
        _check_kernels(engine, base, plan, device)
    if not check_loss(engine, base, device, plan.precision) and first:
        LOGGER.info("this model post-processes its logits; using the unchunked loss")
    if plan.sequence_parallel > 1:
        check_sequence_parallel(engine, base.config, device)
    if packed and (mixing := isolate(engine, base, device)) and first:
        LOGGER.info(f"{few(mixing)} would mix the rows of a packed row, and computes them one by one")
    if packed or plan.micro_batch > 1:
        check_length(engine, base.config, device, longest, packed)
    prefixes = not by_row and common_prefix.allowed(plan, base) and shares_prefixes(engine, base.config, device)
    if prefixes and first and alike >= FEWEST and (packed or plan.micro_batch > 1):
        LOGGER.info(f"the {alike} tokens that all rows begin with are computed once in a micro-batch")
    return prefixes


def _check_kernels(engine: Engine, base: Any, plan: TrainingPlan, device: torch.device) -> None:
    """Report what liger-kernel computes; where it changes the model's output, stop using it, or raise UserError if the
    config names it."""
    what = kernels.described(base)
    change = check_kernels(engine, base, device)
    if change <= 1:
        message = f"fused kernels compute {what}"
    elif plan.kernels == "liger":
        raise UserError(
            f"train.kernels is liger, but its kernels change the model's output {change:.3g} times as much as rounding "
            f"may ({what}); set train.kernels: off"
        )
    else:
        kernels.remove(base)
        message = f"fused kernels are off: they change the model's output {change:.3g} times as much as rounding may"
    if torch.distributed.get_rank() == 0:
        LOGGER.info(message)


def _sources(data: Path) -> list[str]:
    """Return the names of the data's sources."""
    names: list[str] = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "sources")["sources"]
    return names


def claim_device(plan: TrainingPlan) -> torch.device:
    """Return this rank's device, ready for use. Raises UserError if the machine lacks the config's hardware."""
    if plan.device == "cpu":
        cpu_matmul.choose()
        return torch.device("cpu")
    number = gpu_of_rank(os.environ, torch.cuda.device_count())
    torch.cuda.set_device(number)
    name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
    if reason := devices.unsupported(capability, name):
        raise UserError(f"hardware.device is cuda, but {reason}")
    if TRAINABLE[plan.method].quantizes() or OPTIMIZERS[plan.optimizer].built.startswith("bitsandbytes."):
        bitsandbytes_patches.check_cuda_library()
    if plan.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{name} has no bf16, but this run trains in it; correct hardware.compute_capability")
    return torch.device(devices.GPU, number)


def _connect(plan: TrainingPlan, config: ZeroJson, device: torch.device) -> None:
    """Join the ranks into one process group. Collective. Raises UserError if two ranks use one GPU."""
    engine_class(plan.engine).connect(config, device)
    if devices.on_gpu(device):
        check_own_gpu(device)


def _write_metrics(
    directory: Path,
    loop: Loop,
    trainable_parameters: int,
    paths: Paths,
    measured: dict[str, float],
    total_seconds: float,
) -> None:
    """Write loss.csv, telemetry.csv, train.json and train_resources.json. Rank 0 only."""
    batches, validations = loop.batches, loop.validations
    tokens, validated = batches.tokens_until(batches.steps), dict(validations.made)
    # Without validation rows the last adapter is published, and its loss on them is missing.
    published_step, published = validations.published or (loop.step, {})
    table = io.StringIO()
    more = [*loop.metrics, *(task.name for task in loop.tasks)]
    names = [*loop.metrics, *map(_validated, [*more, *validations.sources])]
    sources = [f"loss.{name}" for name in _sources(paths.data)] if loop.losses_of_sources else []
    columns = ["step", "loss", "learning_rate", "loss_validation", *names, *sources]
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    for row in loop.history():
        figures = validated.get(row["step"], {})
        held_out = {_validated(name): value for name, value in figures.items()}
        of_sources = dict(zip(sources, loop.losses_of_sources[row["step"] - 1], strict=True)) if sources else {}
        writer.writerow({**row, **_known(held_out), **_known(of_sources)})
    metrics = {
        "steps": batches.steps,
        "planned_steps": batches.planned,
        "tokens": tokens,
        "supervised_tokens": batches.supervised_tokens,
        "trainable_parameters": trainable_parameters,
        "loss_first": loop.losses[0],
        "loss_last": loop.losses[-1],
        **_known({_validated(name): value for name, value in published.items()}),
        **_known({f"{name}_first": values[0] for name, values in loop.metrics.items()}),
        **_known({f"{name}_last": values[-1] for name, values in loop.metrics.items()}),
        "published_step": published_step,
        "order": batches.order_digest(),
        **batches.balance(),
        **loop.telemetry.routed(),
        **_by_source(_sources(paths.data), loop.loss_by_source.tolist(), batches),
    }
    compiled = _compiled(loop.plan)
    # Figures that differ between two equal runs are in a separate file, so that their train.json are the same bytes.
    resources = {
        "machine": computing(loop.plan.device),
        "ranks": loop.world,
        "resumes": loop.resumes,
        "training_seconds": loop.seconds,
        "total_seconds": total_seconds,
        "tokens_per_second": tokens / loop.seconds,
        **loop.telemetry.summary(),
        **measured,
        **compiled,
        **({"checkpoint_bytes": loop.checkpoints.size} if loop.checkpoints.size else {}),
    }
    loop.telemetry.publish(directory / FILE)
    write_text(directory / "loss.csv", table.getvalue())
    write_json(directory / "train.json", metrics)
    write_json(directory / "train_resources.json", resources)
    losses = "loss {loss_first:.3g} -> {loss_last:.3g}".format_map(metrics)
    losses += f", validation {metrics['loss_validation']:.3g}" if published else ", no validation rows"
    result(f"{losses}, {resources['tokens_per_second']:.0f} tokens/s")


def _validated(name: str) -> str:
    """Return the name of a figure in validation: loss_validation, and loss_validation.SOURCE of loss.SOURCE."""
    figure, dot, source = name.partition(".")
    return f"{figure}_validation{dot}{source}"


def _known(figures: dict[str, float]) -> dict[str, float]:
    """Return figures without those of no item, such as the reward of undesirable answers in a step without any."""
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def _compiled(plan: TrainingPlan) -> dict[str, int]:
    """Return the numbers of compiled graphs; empty without train.compile."""
    if not plan.compile:
        return {}
    from zerolora.train.compiled_layers import compiled_layers  # imports torch's compiler

    figures = compiled_layers.summary()
    if figures["recompiled_graphs"]:
        LOGGER.warning(
            f"train.compile: {figures['recompiled_graphs']} of {figures['compiled_graphs']} graphs were compiled after "
            "the first step with their length; each takes seconds"
        )
    return figures


def _by_source(sources: list[str], losses: list[float], batches: Batches) -> dict[str, float]:
    """Return each source's tokens and its shares of supervised tokens and loss; empty for a single source."""
    if len(sources) == 1:
        return {}
    tokens, supervised = batches.tokens_by_source(len(sources)), batches.supervised_by_source(len(sources))
    result: dict[str, float] = {}
    for number, name in enumerate(sources):
        result[f"loss_share.{name}"] = losses[number] / sum(losses)
        result[f"supervised_share.{name}"] = supervised[number] / sum(supervised)
        result[f"tokens.{name}"] = tokens[number]
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=TrainSettings.model_validate_json, required=True)
    for field in fields(Paths):
        needed = field.default is MISSING
        parser.add_argument(f"--{field.name}", type=Path, required=needed, default=None if needed else field.default)
    parser.add_argument("--keep-checkpoints", type=int, default=2)
    parser.add_argument("--losses-only", action="store_true")
    parser.add_argument("--no-kernels", action="store_true")
    return parser.parse_args()


def _load(arguments: argparse.Namespace) -> None:
    """Import libraries that are needed later: forked ranks share everything loaded before."""
    bitsandbytes_patches.load()  # before peft, so no module here imports that
    importlib.import_module("transformers.optimization")  # for schedule.py
    with contextlib.suppress(UserError):  # the rank itself reports it
        plan, _ = read_plan(arguments.settings, arguments.zero)
        engine_class(plan.engine).load_library()
        for architecture in foreign.model_config(located(arguments.weights)).get("architectures") or []:
            getattr(transformers, architecture, None)


def main() -> None:
    """Run one rank. Exit codes: 2 with one line for a user's mistake or the system's, STOPPED after a stop signal."""
    arguments = _arguments()
    _load(arguments)
    become_rank()
    set_up()
    try:
        paths = Paths(**{field.name: getattr(arguments, field.name) for field in fields(Paths)})
        train(arguments.settings, paths, arguments.keep_checkpoints, arguments.losses_only, arguments.no_kernels)
    except Stopped as stopped:
        if os.environ["RANK"] == "0":
            LOGGER.info("%s", stopped)
        _leave(STOPPED)
    except EXPECTED as error:
        LOGGER.error("%s", message_of(error))
        _leave(2)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End this process at once. After a mistake other ranks may wait in a collective, until the launcher ends them. And
    torch may never exit: destroying a process group holds the GIL while it waits for a thread that needs it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
