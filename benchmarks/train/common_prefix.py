"""Compare training steps that compute the common prefix of a micro-batch's rows once with steps that compute all rows.

    .venv/bin/python benchmarks/train/common_prefix.py

Needs the base model: run `make run` first. In one process with one thread, forward and backward pass of the
micro-batches of one of two ranks, in turn with and without: rows of the reference task, four at a time, and a chat set
whose conversations have a system prompt of --system words, also packed. CPU seconds are those of the process; losses
and gradients of the first micro-batches are compared too. Writes benchmarks/results/train_common_prefix.json.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contest import TRAIN, Task, about, chat_task, model_of, parser, reference_task
from measuring import by_round, turns

from zerolora.config.settings import TrainingPlan, TrainSettings
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.files import write_json
from zerolora.machine import cpu_matmul
from zerolora.model.manifest import located
from zerolora.train.adapter import adapt, base_of
from zerolora.train.common_prefix import allowed
from zerolora.train.feed import Batches, PackedRow, collate
from zerolora.train.isolation import shares_prefixes
from zerolora.train.loss import token_losses

CPU = torch.device("cpu")
VARIANTS = {"whole rows": False, "prefix once": True}
ROWS, RANKS = 4, 2  # of a micro-batch, and the ranks that share a global batch
LONGEST = 120  # words of a conversation beside its system prompt
CAPACITY = 1024


def main() -> None:
    """Take turns, compare, write."""
    made = parser(__doc__, "train_common_prefix.json")
    made.add_argument("--system", type=int, default=100, help="words of the system prompt")
    options = made.parse_args()
    torch.set_num_threads(1)
    cpu_matmul.choose()
    with tempfile.TemporaryDirectory() as name:
        result = about("cpu") | {"model": options.model.stem, "steps": options.steps, "system_words": options.system}
        result["tasks"] = tasks(Path(name), options)
        write_json(options.output, result)


def tasks(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each task."""
    model = model_of(options, folder)
    (folder / "reference").mkdir()
    reference = reference_task(folder / "reference", model, options)
    counts = {"train": 400, "validation": 8, "test": 8}
    chat = chat_task(folder / "chat", model, "cpu", counts, CAPACITY, longest=LONGEST, system=options.system)
    packing = {"packing": True, "capacity": CAPACITY}
    return {
        "reference task": figures(reference, options, {}, ROWS),
        "system prompt": figures(chat, options, {}, ROWS),
        "system prompt, packed": figures(chat, options, packing, 1),
    }


def figures(task: Task, options: argparse.Namespace, pack: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """Return CPU seconds of a micro-batch in both variants, their ratio, and how far their results differ."""
    train = {**TRAIN, "max_steps": options.steps, "global_batch": micro_batch * RANKS, "micro_batch": micro_batch}
    train |= {"ranks_per_node": RANKS, "precision": "fp32", "attention": "flash"}
    ours = task.ours(f"ours-{bool(pack)}", train, pack, strategy="ddp", threads="1")
    plan = TrainingPlan.of(TrainSettings.model_validate(ours.settings), ours.zero.choice)
    batches = Batches(open_split(task.data, "train"), open_plan(ours.folder / "packing/train.arrow"), plan, 0, RANKS)
    micro_batches = [batches.at(step)[0][0] for step in range(batches.steps)]
    model = adapt(located(task.folder / "weights/model.json"), plan, ours.zero, CPU)
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if "lora_B" in name:  # zeros would hide the gradients of the first factors
            torch.nn.init.normal_(value, std=0.01)
    model.train()
    assert allowed(plan, base_of(model)) and shares_prefixes(model, base_of(model).config, CPU)
    packed = bool(pack)
    compared = [differences(model, rows, packed) for rows in micro_batches[:2]]
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for name in turns(VARIANTS, options.rounds):
        started = time.process_time()
        for rows in micro_batches[options.warm_up :]:
            backward(model, collate(rows, packed, CPU, VARIANTS[name]))
        seconds[name].append((time.process_time() - started) / (len(micro_batches) - options.warm_up))
        print(f"{name}: {seconds[name][-1]:.3f} CPU seconds", flush=True)
    ratios = [one / other for one, other in zip(*seconds.values(), strict=True)]
    counts = {
        name: sum(collate(rows, packed, CPU, prefixes)["input_ids"].numel() for rows in micro_batches)
        for name, prefixes in VARIANTS.items()
    }
    return {
        "positions": counts,
        "cpu_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": by_round(ratios),
        "largest_relative_difference_of_losses": max(loss for loss, _ in compared),
        "largest_relative_difference_of_gradients": max(gradient for _, gradient in compared),
    }


def backward(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Compute the gradients of a batch's mean loss, and return the losses in the order of sequences."""
    model.zero_grad()
    losses = token_losses(model, batch)
    losses.mean().backward()
    return losses.detach()[batch["sequence"].argsort(stable=True)]


def differences(model: Any, rows: list[PackedRow], packed: bool) -> tuple[float, float]:
    """Return the largest difference of losses, over the mean loss, and of gradients, over each tensor's largest."""
    results = []
    for prefixes in VARIANTS.values():
        losses = backward(model, collate(rows, packed, CPU, prefixes))
        gradients = [value.grad.clone() for value in model.parameters() if value.grad is not None]
        results.append((losses, gradients))
    (one, expected), (other, actual) = results
    relative = ((a - b).abs().max() / a.abs().max() for a, b in zip(expected, actual, strict=True))
    return float((one - other).abs().max() / one.mean()), float(max(relative))


if __name__ == "__main__":
    main()
