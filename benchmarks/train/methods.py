"""Hold what the methods of training cost against each other: memory, time, and what is written.

    .venv/bin/python benchmarks/train/methods.py
    .venv/bin/python benchmarks/train/methods.py --device cuda --model config/recipes/models/qwen2.5-7b.json

Needs the base model: run `make run` first. Trains each method with `zerolora train` on one rank under zero0, on rows of
the reference task, in turns. Told are the peak of the rank's memory, and what `zerolora estimate` says of it; the
median seconds of a step, and their ratio to lora's of the same round; the seconds beside the steps, for loading,
validation and writing; and the bytes of what is published. Writes benchmarks/results/train_methods.json.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from against_reference import VALIDATED, reference_task
from contest import RESULTS, TRAIN, Ours, about, add_options, model_of

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
    options = _options()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = model_of(options, folder)
        task = reference_task(folder, model, options, VALIDATED)
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
    """Train once and return what it took."""
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


def summary(found: list[dict[str, float]], baseline: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of all rounds, and of the ratios of step times within each round."""
    ratios = [one["step_seconds"] / other["step_seconds"] for one, other in zip(found, baseline, strict=True)]
    medians = {key: statistics.median(each[key] for each in found) for key in found[0]}
    return medians | {"step_over_lora": statistics.median(ratios), "rounds": found}


def predicted(ours: Ours, device: str) -> int:
    """Return the bytes that the estimate says a rank's GPU, or the host, holds at its peak."""
    (result,) = (
        each
        for each in read_json(ours.folder / "estimate.json", "estimate")["strategies"]
        if each["strategy"] == "zero0"
    )
    return int(result["gpu" if device == "cuda" else "host"]["total"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "train_methods.json")
    parser.add_argument("--rows", type=int, default=4, help="of a step, each of up to --max-length tokens")
    parser.add_argument("--max-length", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
