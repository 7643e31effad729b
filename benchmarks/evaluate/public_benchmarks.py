"""Collect the result of the recipe smollm2-135m-benchmarks: base and tuned model on the same rows.

    .venv/bin/zerolora init --recipe smollm2-135m-benchmarks --force
    .venv/bin/snakemake --profile profiles/local all
    .venv/bin/python benchmarks/evaluate/public_benchmarks.py [--project DIRECTORY]

Writes benchmarks/results/public.json and puts its table into docs/tasks.md.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import RESULTS, machine, parser_of, put, table

from zerolora.evaluate.intervals import mcnemar
from zerolora.files import read_json, write_json

SHOWN = {
    "asdiv": ("ASDiv", "accuracy"),
    "boolq": ("BoolQ", "accuracy"),
    "mmlu": ("MMLU", "accuracy"),
    "piqa": ("PIQA", "accuracy_norm"),
    "xsum": ("XSum", "rougeL"),
}
"""Name and metric of each task in the table."""


def main() -> None:
    """Collect, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--project", type=Path, default=Path())
    results = parser.parse_args().project / "results"
    result: dict[str, Any] = {"machine": machine(), "tasks": {}}
    models = {"base": results / "base/reference/tasks", "tuned": results / "default/tasks"}
    for task in SHOWN:
        right = [
            [row["right"] for row in read_json(folder / f"{task}.answers.json", "snakemake")]
            for folder in models.values()
        ]
        gained = sum(after > before for before, after in zip(*right, strict=True))
        lost = sum(after < before for before, after in zip(*right, strict=True))
        metrics = {name: read_json(folder / f"{task}.json", "snakemake") for name, folder in models.items()}
        result["tasks"][task] = {**metrics, "gained": gained, "lost": lost, "p": mcnemar(gained, lost)}
    write_json(RESULTS / "public.json", result)
    put("tasks.md", "public benchmarks", markdown(result))


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table of a result."""
    rows = []
    for task, (name, metric) in SHOWN.items():
        row = result["tasks"][task]
        pairs = (f"{row['gained']}, {row['lost']}", f"{row['p']:.2g}") if metric == "accuracy" else ("", "")
        intervals = (_interval(row[model], metric) for model in ("base", "tuned"))
        rows.append((name, row["base"]["rows"], f"`{metric}`", *intervals, *pairs))
    return table(["task", "rows", "metric", "base", "tuned", "gained, lost", "p"], rows)


def _interval(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} ({metrics[f'{name}_low']:.3f} to {metrics[f'{name}_high']:.3f})"


if __name__ == "__main__":
    main()
