"""Choose the reference task's hyperparameters on the validation split, and measure random splits of the sums.

    .venv/bin/python benchmarks/reference_task.py

Needs the base model: run `make run` first. Trains each candidate with config/config.yaml's settings and its overrides,
evaluates the 200 validation rows, and writes benchmarks/results/reference_task.json. The test split is never read.
Takes about four minutes a candidate on two cores.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "train"))

from contest import MODEL, reference_task, training_settings
from measuring import RESULTS, ROOT, machine

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import EvaluateRunSettings
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.files import read_json, write_json
from zerolora.merge.merge import merge
from zerolora.model.manifest import located

CANDIDATES: list[tuple[str, dict[str, Any]]] = [
    ("tens", {"max_steps": 50, "learning_rate": 1e-3}),
    ("tens", {"max_steps": 75, "learning_rate": 1e-3}),
    ("tens", {"max_steps": 75, "learning_rate": 2e-3}),
    ("tens", {"max_steps": 100, "learning_rate": 2e-3}),
    ("random", {"max_steps": 100, "learning_rate": 2e-3}),
]


def main() -> None:
    """Train and evaluate every candidate."""
    settings = resolve(load(ROOT / "config/config.yaml")).model_dump(mode="json")
    results = []
    for rule, overrides in CANDIDATES:
        with tempfile.TemporaryDirectory() as folder:
            results.append({"rule": rule, **overrides, **measured(settings, rule, overrides, Path(folder))})
        print(results[-1], flush=True)
        write_json(
            RESULTS / "reference_task.json", {"machine": machine(), "split": "validation", "candidates": results}
        )


def measured(settings: dict[str, Any], rule: Any, overrides: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the metrics of a candidate on the validation split."""
    options = argparse.Namespace(device="cpu", max_length=settings["prepare"]["reference"]["max_length"])
    task = reference_task(folder, MODEL, options, None, rule)
    strategy = settings["runs"]["default"]["render"]["strategy"]
    ours = task.ours("candidate", training_settings() | overrides, {}, strategy)
    ours.train()
    weights, run, merged = located(folder / "weights/model.json"), ours.folder / "run", folder / "merged"
    merge(weights, run / "adapter", merged, merged, task.data)
    evaluation = EvaluateRunSettings.model_validate({**settings["evaluate"]["reference"], "split": "validation"})
    tuned = EvaluatedModel(weights, run / "adapter", merged)
    evaluate(evaluation, task.data, tuned, folder / "metrics", folder / "answers.json")
    return {
        **read_json(folder / "metrics/evaluate.json", "evaluate"),
        "loss_validation": read_json(run / "metrics/train.json", "train")["loss_validation"],
        "training_seconds": read_json(run / "metrics/train_resources.json", "train")["training_seconds"],
    }


if __name__ == "__main__":
    main()
