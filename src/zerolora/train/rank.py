"""What one rank does: load, adapt, train under DeepSpeed, save. The main path is `train`, top to bottom.

Started by launcher.py, never by hand: `python -m zerolora.train.rank --settings JSON …`.
"""

import argparse
import csv
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from tqdm import tqdm

from zerolora.data.plan import open_plan
from zerolora.data.rows import open_split
from zerolora.errors import UserError
from zerolora.files import MANIFEST, read_json, write_json, write_text
from zerolora.model.manifest import located
from zerolora.telemetry import PeakMemory
from zerolora.train import schedule
from zerolora.train.adapter import adapt, expected_tensors, save
from zerolora.train.batch import Batches, collate, loss_sum, packed_row
from zerolora.train.isolation import check_isolation

LOG_SECONDS = 15  # between two lines where there is no terminal for a bar


def train(settings: dict[str, Any], data: Path, packing: Path, zero: Path, weights: Path, output: Path) -> None:
    """Train one adapter and write `output`/adapter, metrics/train.json, metrics/train_resources.json, metrics/loss.csv.

    Collective: every rank calls it; rank 0 writes. Raises UserError if the device is not what the config says,
    packed rows would see each other, a loss is not finite, or the finished adapter is not whole.
    """
    started = time.monotonic()
    config = read_json(zero, "zerolora render")
    packed = read_json(packing / "stats.json", "zerolora pack")["packing"]
    sources = read_json(data / MANIFEST, "zerolora prepare")["sources"]
    device = claim_device(settings, config)
    # DeepSpeed would compile this shared-memory transport on first use, for minutes; gloo needs no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    memory = PeakMemory(device)

    model = adapt(located(weights), settings, config)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings["learning_rate"], weight_decay=settings["weight_decay"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    if packed:
        check_isolation(engine, model.config, device)
    batches = Batches(open_split(data, "train"), open_plan(packing / "train.arrow"), settings, rank, world)
    history = []
    loss_by_source = torch.zeros(len(sources), dtype=torch.float64)
    torch.manual_seed(settings["seed"] + rank)  # dropout differs between ranks and repeats between runs
    engine.train()
    training_started = time.monotonic()
    with Progress(batches.steps, rank) as bar:
        for step in range(batches.steps):
            rate = schedule.learning_rate(settings, step, batches.steps)
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            micro_batches, tokens = batches.at(step)
            total = torch.zeros((), dtype=torch.float64)
            for micro_batch in micro_batches:
                loss, parts = loss_sum(engine, collate(micro_batch, packed, device), len(sources))
                # DeepSpeed divides by ranks and by accumulation; a token must count the same in every batch.
                engine.backward(loss * (world * len(micro_batches) / tokens))
                engine.step()
                total += loss.detach().cpu()
                loss_by_source += parts.cpu()
            mean = _summed(total, device) / tokens
            if not torch.isfinite(torch.tensor(mean)):
                raise UserError(f"loss is {mean} at step {step + 1}; lower train.learning_rate")
            history.append({"step": step + 1, "loss": mean, "learning_rate": rate})
            bar.update(mean, batches.tokens_until(step + 1))
    seconds = time.monotonic() - training_started

    validation = _validate(engine, data, packing, packed, settings["micro_batch"], len(sources), device)
    loss_by_source = loss_by_source.to(device)
    torch.distributed.all_reduce(loss_by_source)
    save(engine, output / "adapter", rank, expected_tensors(located(weights), settings["lora"]))
    peaks = memory.of_all_ranks()
    if rank == 0:
        tokens = batches.tokens_until(batches.steps)
        _write_metrics(
            output / "metrics",
            history,
            {
                "steps": batches.steps,
                "tokens": tokens,
                "supervised_tokens": batches.supervised_tokens,
                "trainable_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainable),
                "loss_first": history[0]["loss"],
                "loss_last": history[-1]["loss"],
                "loss_validation": validation,
                **batches.balance(),
                **_by_source(sources, loss_by_source.tolist(), batches),
            },
            {
                "ranks": world,
                "training_seconds": seconds,
                "total_seconds": time.monotonic() - started,
                "tokens_per_second": tokens / seconds,
                **peaks,
            },
        )
    torch.distributed.barrier()
    engine.destroy()
    torch.distributed.destroy_process_group()


def claim_device(settings: dict[str, Any], zero: dict[str, Any]) -> torch.device:
    """Return this rank's device. Raises UserError if the machine has not what the config says."""
    if settings["device"] == "cpu":
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


def _validate(
    engine: Any, data: Path, packing: Path, packed: bool, micro_batch: int, sources: int, device: torch.device
) -> float:
    """Return the mean loss per supervised token of the validation rows, over all ranks."""
    rows, plan = open_split(data, "validation"), open_plan(packing / "validation.arrow")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine.eval()
    total, tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    count = len(plan.starts) - 1
    with torch.no_grad():
        # Every rank makes the same number of forward passes (stage 3 gathers in each); a rank out of rows repeats one.
        for start in range(0, count, micro_batch * world):
            first = start + rank * micro_batch
            numbers = range(first, min(first + micro_batch, count)) if first < count else [0]
            batch = collate([packed_row(rows, plan, number) for number in numbers], packed, device)
            loss, _ = loss_sum(engine, batch, sources)
            if first < count:
                total += loss.cpu()
                tokens += (batch["labels"] >= 0).sum().cpu()
    return _summed(total, device) / _summed(tokens, device)


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


def _summed(value: torch.Tensor, device: torch.device) -> float:
    value = value.to(device)
    torch.distributed.all_reduce(value)
    return value.item()


class Progress:
    """A bar with loss, tokens/s and remaining time in a terminal; a line now and then in a log. Rank 0 only."""

    def __init__(self, steps: int, rank: int) -> None:
        terminal = sys.stderr.isatty()
        self.silent = rank != 0
        self.bar = tqdm(total=steps, unit="step", disable=self.silent or not terminal, dynamic_ncols=True)
        self.lines = not self.silent and not terminal
        self.started = self.logged = time.monotonic()
        self.steps, self.step = steps, 0

    def __enter__(self) -> "Progress":
        return self

    def update(self, loss: float, tokens: int) -> None:
        self.step += 1
        now = time.monotonic()
        rate = tokens / (now - self.started)
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:.0f} tokens/s", refresh=False)
        self.bar.update()
        if self.lines and (now - self.logged >= LOG_SECONDS or self.step == self.steps):
            self.logged = now
            left = (now - self.started) / self.step * (self.steps - self.step)
            print(
                f"step {self.step}/{self.steps}  loss {loss:.4f}  {rate:.0f} tokens/s  {left:.0f} s left",
                file=sys.stderr,
            )

    def __exit__(self, *_: object) -> None:
        self.bar.close()


def _write_metrics(
    directory: Path, history: list[dict[str, float]], metrics: dict[str, Any], resources: dict[str, Any]
) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, ["step", "loss", "learning_rate"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    write_text(directory / "loss.csv", table.getvalue())
    write_json(directory / "train.json", metrics)
    # What the machine's mood changes stands apart, so that the metrics of two equal runs are equal files.
    write_json(directory / "train_resources.json", resources)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    for name in ("data", "packing", "zero", "weights", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Run one rank; a user's mistake ends it with one line and exit code 2."""
    arguments = _arguments()
    try:
        train(
            arguments.settings,
            arguments.data,
            arguments.packing,
            arguments.zero,
            arguments.weights,
            arguments.output,
        )
    except UserError as error:
        print(f"zerolora train: {error}", file=sys.stderr)
        # Other ranks may wait in a collective: leave at once, the launcher ends them.
        sys.stderr.flush()
        os._exit(2)


if __name__ == "__main__":
    main()
