"""Compare the costs of the training methods: memory, time and size of the adapter.

    .venv/bin/python benchmarks/train/methods.py
    .venv/bin/python benchmarks/train/methods.py --device cuda --model config/recipes/models/qwen2.5-7b.json

Needs the base model: run `make run` first. Trains each method on one rank under zero0, on rows of
the reference task, in turn. Reports the peak of the rank's memory and its estimate; the median seconds of a step, and
their ratio to lora's in the same round; the seconds besides the steps, for loading, validation and writing; and the
bytes of the published files. Writes benchmarks/results/train_methods.json.
"""

import argparse
import statistics
from typing import Any

from contest import TRAIN, Ours, about, parser, reference
from measuring import medians

from zerolora.files import read_json, write_json

METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, pissa": {"lora": {"init": "pissa"}},
    "lora, pissa_niter_16": {"lora": {"init": "pissa_niter_16"}},
    "lora, olora": {"lora": {"init": "olora"}},
    "dora": {"method": "dora"},
    "qlora, nf4": {"method": "qlora"},
    "qlora, int8": {"method": "qlora", "quantization": {"type": "int8"}},
    "qdora, nf4": {"method": "qdora"},
    "ia3": {"method": "ia3"},
    "full": {"method": "full"},
}
BASELINE = "lora"


def main() -> None:
    """Take turns, compare, write."""
    made = parser(__doc__, "train_methods.json")
    made.add_argument("--rows", type=int, default=4, help="of a step, each of up to --max-length tokens")
    options = made.parse_args()
    with reference(options) as task:
        steps = {
            **TRAIN, "max_steps": options.steps, "precision": options.precision, "ranks_per_node": 1,
            "micro_batch": options.rows, "global_batch": options.rows,
        }  # fmt: skip
        trained = {
            name: task.ours(name.replace(", ", "-"), {**steps, **settings}, {}, "zero0")
            for name, settings in METHODS.items()
        }
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trained}
        for number in range(options.rounds):
            for name, ours in trained.items():
                rounds[name].append(measured(ours, options))
                print(f"round {number + 1}: {name}: {rounds[name][-1]}", flush=True)
        result = about(options.device) | {
            "model": options.model.stem, "precision": options.precision, "rows": options.rows, "steps": options.steps,
            "warm_up": options.warm_up, "max_length": options.max_length,
            "methods": {
                name: summary(values, rounds[BASELINE]) | {"predicted_bytes": predicted(trained[name], options.device)}
                for name, values in rounds.items()
            },
        }  # fmt: skip
        write_json(options.output, result)


def measured(ours: Ours, options: argparse.Namespace) -> dict[str, float]:
    """Train once and return time, memory and sizes."""
    run = ours.train()
    total = read_json(ours.folder / "run/metrics/train_resources.json", "train")
    seconds = [step.seconds for step in run.steps]
    return {
        "peak_bytes": run.peak_gpu_bytes if options.device == "cuda" else run.peak_host_bytes,
        "step_seconds": statistics.median(seconds[options.warm_up :]),
        "other_seconds": total["total_seconds"] - sum(seconds),
        "published_bytes": sum(path.stat().st_size for path in (ours.folder / "run/adapter").glob("*.safetensors")),
        "trained_parameters": read_json(ours.folder / "run/metrics/train.json", "train")["trainable_parameters"],
    }


def summary(values: list[dict[str, float]], baseline: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of all rounds, and of the ratios of step times within each round."""
    ratios = [one["step_seconds"] / other["step_seconds"] for one, other in zip(values, baseline, strict=True)]
    return medians(values) | {"step_over_lora": statistics.median(ratios), "rounds": values}


def predicted(ours: Ours, device: str) -> int:
    """Return the estimated peak of a rank's GPU, or of the host, in bytes."""
    strategies = read_json(ours.folder / "estimate.json", "estimate")["strategies"]
    (result,) = (each for each in strategies if each["strategy"] == "zero0")
    return int(result["gpu" if device == "cuda" else "host"]["total"])


if __name__ == "__main__":
    main()
