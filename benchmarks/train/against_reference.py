"""Train the reference task with `zerolora stage train` and in the published experiment's own way, in turn, and compare.

    .venv/bin/python benchmarks/train/against_reference.py
    .venv/bin/python benchmarks/train/against_reference.py --device cuda --model config/recipes/models/qwen2.5-7b.json

Needs the base model: run `make run` first. The experiment's way is transformers' Trainer under DeepSpeed's stage 2 with
16 rows a rank, prompts padded to 30 and answers to 20 tokens (or to the longest, if this model's tokenizer needs more),
logits of every position, and activation checkpointing. It is also measured without checkpointing and, on a CPU, then
with zerolora's choice of fp32 matmul kernels (src/zerolora/machine/cpu_matmul.py). Its stages 0, 1 and 2 with offload
took the same time, so the optimizer stays on the device here. Both train the same adapter (r 8, alpha 64, dropout 0.01)
on the same rows with the same global batch; ours with the embedded default's micro-batch. Only real tokens of the steps
after --warm-up are counted. Writes benchmarks/results/train_reference.json.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contest import (
    ROOT,
    Ours,
    Run,
    Task,
    about,
    opponent,
    parser,
    ranks_of,
    ratio,
    reference,
    summary,
    take_turns,
)

from zerolora.data.prepared_rows import IGNORED, open_split
from zerolora.files import read_json, write_json

LORA = {"r": 8, "alpha": 64.0, "dropout": 0.01, "targets": "all-linear"}
TRAIN = {
    "learning_rate": 1e-4,
    "schedule": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.1,
    "gradient_clipping": 1.0,
    "seed": 42,
}
ROWS_A_RANK = 16
PROMPT, ANSWER = 30, 20
STAGE_2 = ROOT / "config/deepspeed/reference-stage2.json"


def main() -> None:
    """Take turns, compare, write."""
    made = parser(__doc__, "train_reference.json")
    made.add_argument("--ranks", type=int, default=ranks_of("cuda" if torch.cuda.is_available() else "cpu")[-1])
    made.add_argument("--micro-batch", type=int, default=4, help="of ours")
    options = made.parse_args()
    with reference(options, validated=None) as task:
        ours = ours_of(task, options)
        padded = lengths(task.data)
        result = about(task.device) | {
            "model": options.model.stem, "precision": options.precision, "lora": LORA, "train": TRAIN,
            "data": task.stats, "ranks": options.ranks, "rows_a_step": ROWS_A_RANK * options.ranks,
            "padded_to": {"prompt": padded[0], "answer": padded[1]}, "rendered": ours.zero.as_json()["zerolora"],
            "steps": options.steps, "warm_up": options.warm_up,
        }  # fmt: skip
        runs = take_turns({"zerolora": ours.train, **others_of(task, options)}, options.rounds)
        write_json(options.output, {**result, **compared(runs, options.warm_up)})


def ours_of(task: Task, options: argparse.Namespace) -> Ours:
    """Return zerolora as a contestant."""
    train = {
        **TRAIN, "lora": LORA, "ranks_per_node": options.ranks,
        "global_batch": ROWS_A_RANK * options.ranks, "max_steps": options.steps,
        "micro_batch": options.micro_batch, "precision": options.precision,
    }  # fmt: skip
    return task.ours("ours", train, {})


def others_of(task: Task, options: argparse.Namespace) -> dict[str, Callable[[], Run]]:
    """Return the experiment's way, with and without activation checkpointing; on a CPU also with our matmul kernels."""
    zero = read_json(STAGE_2, "the experiment")
    del zero["zero_optimization"]["offload_optimizer"]
    ways = {"reference": (True, False), "reference without checkpointing": (False, False)}
    if task.device == "cpu":
        ways["reference without checkpointing, by oneDNN"] = (False, True)
    made: dict[str, Callable[[], Run]] = {}
    for label, (checkpointing, onednn) in ways.items():
        settings = {
            **TRAIN, "lora": LORA, "model": str(task.model), "data": str(task.data),
            "device": task.device, "precision": options.precision, "attention": "sdpa", "padded": lengths(task.data),
            "micro_batch": ROWS_A_RANK, "accumulation": 1, "max_steps": options.steps,
            "gradient_checkpointing": checkpointing, "deepspeed": zero, "onednn": onednn,
        }  # fmt: skip
        made[label] = functools.partial(opponent, "reference", task.folder / label, settings, options.ranks)
    return made


def lengths(data: Path) -> list[int]:
    """Return the padded lengths of prompts and answers in tokens: as published, or the longest if that is longer."""
    rows = open_split(data, "train")
    prompts = [next(index for index, label in enumerate(row) if label != IGNORED) for row in rows["labels"]]
    answers = [length - prompt for length, prompt in zip(rows["length"], prompts, strict=True)]
    return [max(PROMPT, *prompts), max(ANSWER, *answers)]


def compared(runs: dict[str, list[Run]], warm_up: int) -> dict[str, Any]:
    """Return all contestants, and the ratios of ours to each of the others: speed and peak memory."""
    others = [name for name in runs if name != "zerolora"]
    return {
        "contestants": {name: summary(result, warm_up) for name, result in runs.items()},
        "speed": {
            name: ratio(runs["zerolora"], runs[name], lambda run: run.tokens_per_second(warm_up)) for name in others
        },
        "host_memory": {name: ratio(runs["zerolora"], runs[name], lambda run: run.peak_host_bytes) for name in others},
    }


if __name__ == "__main__":
    main()
