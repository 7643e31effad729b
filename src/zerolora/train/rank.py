"""What one rank does: load, adapt, train, save. The main path is `train`, top to bottom.

Started by launcher.py through __main__.py.
"""

import argparse
import csv
import gc
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed

from zerolora import cpu_matmul
from zerolora.config.settings import TrainingChoice
from zerolora.data.plan import open_plan
from zerolora.data.rows import open_split
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_json, write_json, write_text
from zerolora.log import LOGGER, result, set_up
from zerolora.manifest import located
from zerolora.peak_memory import PeakMemory
from zerolora.train.adapter import adapt, expected_tensors, save
from zerolora.train.batch import Batches
from zerolora.train.checkpoint.identity import resume_key, run_fingerprint
from zerolora.train.checkpoint.store import Checkpoints
from zerolora.train.engines import select as engines
from zerolora.train.isolation import check_isolation, check_loss
from zerolora.train.launch.heartbeat import Heartbeat
from zerolora.train.launch.stop_signals import STOPPED, Stop, Stopped
from zerolora.train.loop import Loop
from zerolora.train.telemetry.collectives import Collectives
from zerolora.train.telemetry.stopwatch import Stopwatch
from zerolora.train.telemetry.trackers import Tracker
from zerolora.train.telemetry.writer import FILE, TelemetryWriter


def train(
    settings: dict[str, Any], data: Path, packing: Path, zero: Path, weights: Path, checkpoints: Path, output: Path
) -> None:
    """Train one adapter and write `output`/adapter, metrics/train.json, train_resources.json, loss.csv, telemetry.csv.

    Goes on from the newest checkpoint of the same run in `checkpoints`, if there is one. Collective: every rank calls
    it; rank 0 writes. Raises Stopped when asked to stop, with everything saved, and UserError if the device is not what
    the config says, packed rows would see each other, a loss is not finite, or the finished adapter is not whole.
    """
    started = time.monotonic()
    stop, watch = Stop(), Heartbeat()
    config = read_json(zero, "zerolora render")
    settings = {**settings, **TrainingChoice.model_validate(config.pop("zerolora")).model_dump(mode="json")}
    packed = read_json(packing / "stats.json", "zerolora pack")["packing"]
    sources = read_json(data / MANIFEST, "zerolora prepare")["sources"]
    device = claim_device(settings, config)
    times = Stopwatch(device)
    sent = Collectives(times)
    sent.watch()  # before the engines take hold of torch's functions
    engines.connect(config, device)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    memory = PeakMemory(device)

    watch.at("loading")
    model = adapt(located(weights), settings, config)
    engine = engines.start(model, config, settings, device)
    _collect_garbage()
    watch.follow(engine.module, device)

    if not check_loss(engine, engine.module.get_base_model(), device) and rank == 0:
        LOGGER.info("this model makes its logits in a way of its own, so that all are made at once")
    if packed:
        check_isolation(engine, model.config, device)
    batches = Batches(open_split(data, "train"), open_plan(packing / "train.arrow"), settings, rank, world)
    saver = Checkpoints(
        checkpoints,
        resume_key(settings, config, data, packing, weights),
        run_fingerprint(settings, config, batches.steps),
        settings,
    )
    record = TelemetryWriter(engine, batches, times, sent, settings)
    loop = Loop(engine, batches, settings, packed, len(sources), device, saver, record, stop, watch)
    loop.resume()
    split, plan = open_split(data, "validation"), open_plan(packing / "validation.arrow")
    with record:
        if rank == 0:
            # work/checkpoints/<run> has its tracker in work/tracking/<run>.
            place = checkpoints.parent.parent / "tracking" / checkpoints.name
            record.open(saver.folder / FILE, loop.history(), Tracker(settings["tracker"], place, settings))
        loop.run(split, plan)
        if not loop.validations.has(loop.step):
            loop.validate(split, plan)
    batches.end_after(loop.step)
    watch.at("writing the adapter")
    expected = expected_tensors(located(weights), settings["lora"])
    save(engine, output / "adapter", rank, expected, loop.validations.best)
    peaks = memory.of_all_ranks()
    if rank == 0:
        tokens, validated = batches.tokens_until(batches.steps), dict(loop.validations.found)
        published = loop.validations.lowest if loop.validations.best else loop.validations.found[-1]
        record.publish(output / "metrics" / FILE)
        _write_metrics(
            output / "metrics",
            [{**row, "loss_validation": validated.get(row["step"], "")} for row in loop.history()],
            {
                "steps": batches.steps,
                "tokens": tokens,
                "supervised_tokens": batches.supervised_tokens,
                "trainable_parameters": sum(shape.numel() for shape in expected.values()),
                "loss_first": loop.losses[0],
                "loss_last": loop.losses[-1],
                "loss_validation": published[1],
                "published_step": published[0],
                **batches.balance(),
                **_by_source(sources, loop.loss_by_source.tolist(), batches),
            },
            {
                "ranks": world,
                "resumes": loop.resumes,
                "training_seconds": loop.seconds,
                "total_seconds": time.monotonic() - started,
                "tokens_per_second": tokens / loop.seconds,
                **record.summary(),
                **peaks,
            },
        )
        saver.mark_finished()
    torch.distributed.barrier()
    watch.close()
    engine.close()


def _collect_garbage() -> None:
    """Begin with it, after __main__.py kept it off. What is loaded stays: no collection looks at it again."""
    gc.freeze()
    gc.enable()


def claim_device(settings: dict[str, Any], zero: dict[str, Any]) -> torch.device:
    """Return this rank's device, ready to be used. Raises UserError if the machine has not what the config says."""
    if settings["device"] == "cpu":
        cpu_matmul.choose()
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() <= local_rank:
        raise UserError(
            f"hardware.device is cuda, but this machine shows {torch.cuda.device_count()} GPUs to rank "
            f"{os.environ['RANK']}; correct hardware, or run where the GPUs are"
        )
    torch.cuda.set_device(local_rank)
    if zero.get("bf16", {}).get("enabled") and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(local_rank)
        raise UserError(f"{name} has no bf16, but the config says so; correct hardware.compute_capability")
    return torch.device("cuda", local_rank)


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


def _write_metrics(
    directory: Path, history: list[dict[str, Any]], metrics: dict[str, Any], resources: dict[str, Any]
) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, ["step", "loss", "learning_rate", "loss_validation"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_text(directory / "loss.csv", table.getvalue())
    write_json(directory / "train.json", metrics)
    # What the machine's mood changes stands apart, so that the metrics of two equal runs are equal files.
    write_json(directory / "train_resources.json", resources)
    losses = "loss {loss_first:.3g} -> {loss_last:.3g}, validation {loss_validation:.3g}".format_map(metrics)
    result(f"{losses}, {resources['tokens_per_second']:.0f} tokens/s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    for name in ("data", "packing", "zero", "weights", "checkpoints", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Run one rank. A user's mistake ends it with one line and exit code 2; being stopped with STOPPED."""
    arguments = _arguments()
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
