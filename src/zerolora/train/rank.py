"""One rank: load, adapt, train, save. The main path is `train`, top to bottom.

Started by launcher.py through __main__.py.
"""

import argparse
import contextlib
import copy
import csv
import gc
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed
import transformers

from zerolora.compat import bitsandbytes_patches
from zerolora.compat.transformers_patches import compile_conversions
from zerolora.config.settings import TrainSettings
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.errors import UserError, explained
from zerolora.files import MANIFEST, read_json, write_json, write_text
from zerolora.log import LOGGER, result, set_up
from zerolora.machine import cpu_matmul, devices
from zerolora.machine.peak_memory import PeakMemory
from zerolora.methods.registry import TRAINABLE
from zerolora.model import added_tokens, foreign
from zerolora.model.manifest import base_identity, located
from zerolora.model.prompt_format import write_adapter_format
from zerolora.optimizers import OPTIMIZERS
from zerolora.planner.zero_json import ZeroJson
from zerolora.train import earlier_adapter, schedule
from zerolora.train.adapter import adapt, base_of, expected_tensors, method_of, save, takes_out
from zerolora.train.base_model import loading_of
from zerolora.train.checkpoint.resume_key import resume_key, run_fingerprint
from zerolora.train.checkpoint.store import Checkpoints
from zerolora.train.engines import engine_class
from zerolora.train.engines.engine import Engine, Tensors
from zerolora.train.feed import Batches
from zerolora.train.isolation import check_isolation, check_loss, check_sequence_parallel
from zerolora.train.launch.fork import become_rank
from zerolora.train.launch.heartbeat import Heartbeat
from zerolora.train.launch.stop_signals import STOPPED, Stop, Stopped
from zerolora.train.loop import Loop
from zerolora.train.sequence_parallel import sequence
from zerolora.train.starting_factors import take_out
from zerolora.train.telemetry.collectives import Collectives
from zerolora.train.telemetry.stopwatch import Stopwatch
from zerolora.train.telemetry.trackers import TrackedRun
from zerolora.train.telemetry.writer import FILE, TelemetryWriter
from zerolora.train.training_plan import TrainingPlan


@dataclass(frozen=True)
class Paths:
    """Files and directories of one training."""

    data: Path
    packing: Path
    zero: Path
    """results/<run>/zero.json."""
    weights: Path
    """The file that says where the base weights are."""
    checkpoints: Path
    """Directory of the run's checkpoints."""
    output: Path


def train(
    settings: TrainSettings,
    data: Path,
    packing: Path,
    zero: Path,
    weights: Path,
    checkpoints_of_run: Path,
    output: Path,
    keep_checkpoints: int = 2,
    losses_only: bool = False,
) -> None:
    """Train one adapter and write `output`/adapter, metrics/train.json, train_resources.json, loss.csv, telemetry.csv.

    Goes on from the newest checkpoint of the same run in `checkpoints_of_run`, if there is one. Collective: every rank
    calls it; rank 0 writes. With `losses_only` it writes `output`/telemetry.csv alone, and validates nothing. Raises
    Stopped when asked to stop, with everything saved, and UserError if the device is not what the config says, packed
    rows would see each other, a loss is not finite, or the finished adapter is not whole.
    """
    started = time.monotonic()
    stop, heartbeat = Stop(), Heartbeat()
    paths = Paths(data, packing, zero, weights, checkpoints_of_run, output)
    plan, config = read_plan(settings, zero)
    config = _own_folders(config, paths.checkpoints.name)
    device = claim_device(plan)
    times = Stopwatch(device)
    sent = Collectives(times)
    sent.watch()  # before the engines keep torch's functions
    engine_class(plan.engine).connect(config, device)
    sequence.set(plan.sequence_parallel)
    memory = PeakMemory(device)

    heartbeat.at("loading")
    batches, checkpoints = _run(paths, plan, config, keep_checkpoints)
    if not losses_only:  # a canary makes the first steps of a run
        schedule.check(plan, batches.steps)
    tokens = added_tokens.of_data(data)
    model = adapt(located(weights), plan, config, device, tokens)
    start = {}
    if takes_out(plan):
        sharded = loading_of(plan, config, engine_class(plan.engine)) == "sharded"
        start = take_out(model, plan, checkpoints, sharded, device)
    earlier = Path(plan.from_adapter) if plan.from_adapter else None
    origin = earlier_adapter.load(model, earlier, method_of(plan), tokens) if earlier else None
    engine = engine_class(plan.engine)(model, config, plan, device)
    _collect_garbage()
    heartbeat.follow(engine.module, device)

    loop = _loop(paths, plan, batches, checkpoints, engine, device, times, sent, stop, heartbeat)
    loop.resume()
    split, of_split = open_split(data, "validation"), open_plan(packing / "validation.arrow")
    with loop.telemetry as telemetry:
        if loop.rank == 0:
            # work/checkpoints/<run> has its tracker in work/tracking/<run>.
            folder = paths.checkpoints.parent.parent / "tracking" / paths.checkpoints.name
            tracker = TrackedRun(plan.tracker, folder, plan.model_dump(mode="json"))
            telemetry.open(checkpoints.folder / FILE, loop.history(), tracker)
        loop.run(split, of_split)
        if not losses_only and not loop.validations.has(loop.step):
            loop.validate(split, of_split)
    loop.batches.end_after(loop.step)
    if losses_only:
        checkpoints.wait()
        if loop.rank == 0:
            loop.telemetry.publish(output / FILE)
    else:
        _publish(loop, paths, plan, start, origin, memory, started)
    torch.distributed.barrier()
    heartbeat.close()
    engine.close()


def _publish(
    loop: Loop,
    paths: Paths,
    plan: TrainingPlan,
    start: Tensors,
    origin: dict[str, Any] | None,
    memory: PeakMemory,
    started: float,
) -> None:
    """Write adapter and metrics of a finished loop. Collective. Raises UserError if the adapter is not whole."""
    loop.stop_if_asked()
    loop.heartbeat.at("writing the adapter")
    tokens = added_tokens.of_data(paths.data)
    base = located(paths.weights)
    expected = expected_tensors(base, plan, tokens)
    output, best = paths.output / "adapter", loop.validations.best

    def carry(staged: Path) -> None:
        write_adapter_format(paths.data, base, staged, tokens=tokens)
        _check_launcher(loop)

    identity = base_identity(paths.weights)
    with _resumable():
        save(loop.engine, plan, output, loop.rank, expected, best, start, identity, origin, tokens, carry)
    peaks, energy = memory.of_all_ranks(), loop.telemetry.energy.of_all_ranks()
    loop.checkpoints.wait()  # its size is known then
    if loop.rank == 0:
        _check_launcher(loop)
        published = sum(shape.numel() for shape in expected.values())
        trainable = published - sum(tensor.numel() for tensor in start.values())
        measured = peaks | ({} if energy is None else {"energy_joules": energy})
        with _resumable():
            _write_metrics(paths.output / "metrics", loop, trainable, paths, measured, time.monotonic() - started)
        loop.checkpoints.mark_finished()


def _check_launcher(loop: Loop) -> None:
    """Raise Stopped if the launcher has ended: a result that appears now would be one of a failed stage."""
    if loop.stop.orphaned:
        raise Stopped("the process that started this training has ended; nothing is published")


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """Turn what the operating system refuses, such as space on a disk, into a UserError: the last step's checkpoint has
    been written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{explained(error)}; the same command then resumes from the last checkpoint") from None


def read_plan(settings: TrainSettings, zero: Path) -> tuple[TrainingPlan, ZeroJson]:
    """Return everything that training is told, and the engine's options with it, of a run's zero.json. Raises UserError
    if the file is not what `render` writes."""
    config = ZeroJson.read(zero)
    return TrainingPlan.of(settings, config.choice), config


def _own_folders(config: ZeroJson, run: str) -> ZeroJson:
    """Return options with a folder of the run's own on the disk that states are moved to: DeepSpeed names files by rank
    alone, so two runs on one machine would read each other's."""
    options = copy.deepcopy(config.options)
    for section in ("offload_param", "offload_optimizer"):
        offload = options.get("zero_optimization", {}).get(section) or {}
        if offload.get("nvme_path"):
            offload["nvme_path"] = str(Path(offload["nvme_path"]) / run)
    return ZeroJson(options=options, choice=config.choice)


def _run(paths: Paths, plan: TrainingPlan, config: ZeroJson, keep: int) -> tuple[Batches, Checkpoints]:
    """Return a run's batches, those of this rank, and its checkpoints."""
    rank, world, shared = torch.distributed.get_rank(), torch.distributed.get_world_size(), plan.sequence_parallel
    rows, packing = open_split(paths.data, "train"), open_plan(paths.packing / "train.arrow")
    batches = Batches(rows, packing, plan, rank // shared, world // shared)
    return batches, Checkpoints(
        paths.checkpoints,
        resume_key(plan, config, paths.data, paths.packing, paths.weights),
        run_fingerprint(plan, config, batches.steps),
        every_steps=plan.checkpoint_steps,
        every_minutes=plan.checkpoint_minutes,
        keep=keep,
    )


def _loop(
    paths: Paths,
    plan: TrainingPlan,
    batches: Batches,
    checkpoints: Checkpoints,
    engine: Engine,
    device: torch.device,
    times: Stopwatch,
    sent: Collectives,
    stop: Stop,
    heartbeat: Heartbeat,
) -> Loop:
    """Return the loop of a run whose model was tested. Raises UserError if its packed rows would see each other, or its
    ranks compute something else of shared rows than of their own."""
    packed = read_json(paths.packing / "stats.json", "zerolora pack")["packing"]
    base = base_of(engine.module)
    if not check_loss(engine, base, device, plan.precision) and torch.distributed.get_rank() == 0:
        LOGGER.info("this model post-processes its logits; using the unchunked loss")
    if plan.sequence_parallel > 1:
        check_sequence_parallel(engine, base.config, device)
    if packed:
        check_isolation(engine, base.config, device)
    return Loop(
        engine,
        batches,
        plan,
        packed=packed,
        sources=len(_sources(paths.data)),
        device=device,
        checkpoints=checkpoints,
        telemetry=TelemetryWriter(engine, batches, times, sent, plan),
        stop=stop,
        heartbeat=heartbeat,
    )


def _sources(data: Path) -> list[str]:
    """Return the names of the data's sources."""
    names: list[str] = foreign.manifest(data / MANIFEST, "zerolora prepare", "sources")["sources"]
    return names


def _collect_garbage() -> None:
    """Turn on the garbage collector, which __main__.py kept off; what is loaded by now is never looked at again."""
    gc.freeze()
    gc.enable()


def claim_device(plan: TrainingPlan) -> torch.device:
    """Return this rank's device, ready to be used. Raises UserError if the machine lacks what the config says."""
    if plan.device == "cpu":
        cpu_matmul.choose()
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() <= local_rank:
        raise UserError(
            f"hardware.device is cuda, but this machine shows {torch.cuda.device_count()} GPUs to rank "
            f"{os.environ['RANK']}; correct hardware, or run where the GPUs are"
        )
    torch.cuda.set_device(local_rank)
    name, capability = torch.cuda.get_device_name(local_rank), torch.cuda.get_device_capability(local_rank)
    if reason := devices.unsupported(capability, name):
        raise UserError(f"hardware.device is cuda, but {reason}")
    if TRAINABLE[plan.method].quantizes() or OPTIMIZERS[plan.optimizer].built.startswith("bitsandbytes."):
        bitsandbytes_patches.check_cuda_library()
    if plan.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{name} has no bf16, but the config says so; correct hardware.compute_capability")
    return torch.device("cuda", local_rank)


def _write_metrics(
    directory: Path,
    loop: Loop,
    trainable_parameters: int,
    paths: Paths,
    measured: dict[str, float],
    total_seconds: float,
) -> None:
    """Write loss.csv, telemetry.csv, train.json and train_resources.json of a finished loop. Rank 0 only."""
    batches, validations = loop.batches, loop.validations
    tokens, validated = batches.tokens_until(batches.steps), dict(validations.made)
    published_step, published = validations.best_of_all if validations.best else validations.made[-1]
    table = io.StringIO()
    names = [*loop.metrics, *(f"{name}_validation" for name in loop.metrics)]
    columns = ["step", "loss", "learning_rate", "loss_validation", *names]
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    for row in loop.history():
        figures = validated.get(row["step"], dict.fromkeys(published, ""))
        writer.writerow({**row, **{f"{name}_validation": value for name, value in figures.items()}})
    metrics = {
        "steps": batches.steps,
        "planned_steps": batches.planned,
        "tokens": tokens,
        "supervised_tokens": batches.supervised_tokens,
        "trainable_parameters": trainable_parameters,
        "loss_first": loop.losses[0],
        "loss_last": loop.losses[-1],
        **{f"{name}_validation": value for name, value in published.items()},
        **{f"{name}_first": values[0] for name, values in loop.metrics.items()},
        **{f"{name}_last": values[-1] for name, values in loop.metrics.items()},
        "published_step": published_step,
        **batches.balance(),
        **loop.telemetry.routed(),
        **_by_source(_sources(paths.data), loop.loss_by_source.tolist(), batches),
    }
    # What differs between two equal runs is a file of its own, so that their train.json are the same bytes.
    resources = {
        "ranks": loop.world,
        "resumes": loop.resumes,
        "training_seconds": loop.seconds,
        "total_seconds": total_seconds,
        "tokens_per_second": tokens / loop.seconds,
        **loop.telemetry.summary(),
        **measured,
        **({"checkpoint_bytes": loop.checkpoints.size} if loop.checkpoints.size else {}),
    }
    loop.telemetry.publish(directory / FILE)
    write_text(directory / "loss.csv", table.getvalue())
    write_json(directory / "train.json", metrics)
    write_json(directory / "train_resources.json", resources)
    losses = "loss {loss_first:.3g} -> {loss_last:.3g}, validation {loss_validation:.3g}".format_map(metrics)
    result(f"{losses}, {resources['tokens_per_second']:.0f} tokens/s")


def _by_source(sources: list[str], losses: list[float], batches: Batches) -> dict[str, float]:
    """Return each source's tokens and its shares of the supervised tokens and of their loss, if there are several."""
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
    for name in ("data", "packing", "zero", "weights", "checkpoints", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--keep-checkpoints", type=int, default=2)
    parser.add_argument("--losses-only", action="store_true")
    return parser.parse_args()


def _load(arguments: argparse.Namespace) -> None:
    """Import what is only needed later: the ranks of a node share what is loaded before they are forked."""
    bitsandbytes_patches.load()
    with contextlib.suppress(UserError):  # the rank itself says what is missing
        plan, _ = read_plan(arguments.settings, arguments.zero)
        engine_class(plan.engine).load_library()
        for architecture in foreign.model_config(located(arguments.weights)).get("architectures") or []:
            getattr(transformers, architecture, None)
        compile_conversions()


def main() -> None:
    """Run one rank. A user's mistake ends it with one line and exit code 2; being stopped with STOPPED."""
    arguments = _arguments()
    _load(arguments)
    become_rank()
    set_up()
    try:
        train(
            arguments.settings,
            arguments.data,
            arguments.packing,
            arguments.zero,
            arguments.weights,
            arguments.checkpoints,
            arguments.output,
            arguments.keep_checkpoints,
            arguments.losses_only,
        )
    except Stopped as stopped:
        if os.environ["RANK"] == "0":
            LOGGER.info("%s", stopped)
        _leave(STOPPED)
    except UserError as error:
        LOGGER.error("%s", error)
        _leave(2)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End this process at once. After a mistake other ranks may wait in a collective: the launcher ends them. And torch
    may never end by itself: what destroys a process group holds the GIL while it waits for a thread that wants it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
