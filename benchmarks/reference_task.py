"""Choose the reference task's hyperparameters on the validation split, and show what random splits give.

    .venv/bin/python benchmarks/reference_task.py

Needs the base model: run `make run` first. Trains each candidate with config/config.yaml's settings and its own
overrides, asks the 200 validation rows, and writes benchmarks/results/reference_task.json. The test split is never
opened. Takes about four minutes a candidate on two cores.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import (
    EstimateSettings,
    EvaluateRunSettings,
    PackSettings,
    PrepareSettings,
    RenderSettings,
)
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.reference import records
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.files import canonical, read_json, write_json
from zerolora.memory.estimate import estimate
from zerolora.merge.merge import merge
from zerolora.model.manifest import located
from zerolora.planner.render import render
from zerolora.train.launch.launcher import launch
from zerolora.train.launch.topology import topology

RESULT = Path("benchmarks/results/reference_task.json")
RUN, DATASET = "default", "reference"
CANDIDATES: list[tuple[str, dict[str, Any]]] = [
    ("tens", {"max_steps": 50, "learning_rate": 1e-3}),
    ("tens", {"max_steps": 75, "learning_rate": 1e-3}),
    ("tens", {"max_steps": 75, "learning_rate": 2e-3}),
    ("tens", {"max_steps": 100, "learning_rate": 2e-3}),
    ("random", {"max_steps": 100, "learning_rate": 2e-3}),
]


def main() -> None:
    """Train and judge every candidate."""
    settings = resolve(load(Path("config/config.yaml"))).model_dump(mode="json")
    results = []
    for rule, overrides in CANDIDATES:
        with tempfile.TemporaryDirectory() as folder:
            results.append({"rule": rule, **overrides, **_try(settings, rule, overrides, Path(folder))})
        print(results[-1], flush=True)
        write_json(RESULT, {"machine": machine(), "split": "validation", "candidates": results})


def _try(settings: dict[str, Any], rule: Any, overrides: dict[str, Any], folder: Path) -> dict[str, Any]:
    data_settings = settings["prepare"][DATASET]
    run = settings["runs"][RUN]
    train = {**run["train"], **overrides}
    weights = Path(f"resources/weights/{data_settings['model']}.json")
    model = Path(f"resources/models/{data_settings['model']}")
    write_json(folder / "rows.json", records(rule, 42))
    data = folder / "data"
    prepare(
        PrepareSettings.model_validate({**data_settings, "path": str(folder / "rows.json")}),
        model / "manifest.json",
        data,
    )
    packing = folder / "packing"
    pack_rows(PackSettings.model_validate(run["pack"]), data, packing)
    write_json(folder / "estimate.json", estimate(EstimateSettings.model_validate(run["estimate"]), model, packing))
    zero, _ = render(RenderSettings.model_validate(run["render"]), folder / "estimate.json")
    zero.write(folder / "zero.json")
    paths = {
        "data": data, "packing": packing, "zero": folder / "zero.json", "weights": weights,
        "checkpoints": folder / "checkpoints/run", "output": folder,
    }  # fmt: skip
    arguments = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    where = topology(os.environ, train["nodes"], train["ranks_per_node"])
    launch(where, ["--settings", canonical(train), *arguments], train["device"], folder / "logs")
    merge(located(weights), folder / "adapter", folder / "merged", folder / "merged", data)
    judged = {**settings["evaluate"][DATASET], "split": "validation"}
    tuned = EvaluatedModel(located(weights), folder / "adapter", folder / "merged")
    evaluate(EvaluateRunSettings.model_validate(judged), data, tuned, folder / "metrics", folder / "answers.json")
    trained = read_json(folder / "metrics/train.json", "train")
    return {
        **read_json(folder / "metrics/evaluate.json", "evaluate"),
        "loss_validation": trained["loss_validation"],
        "training_seconds": read_json(folder / "metrics/train_resources.json", "train")["training_seconds"],
    }


if __name__ == "__main__":
    main()
