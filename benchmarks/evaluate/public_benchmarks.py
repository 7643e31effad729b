"""Collect what the recipe of public benchmarks measured: base and tuned on the same rows.

    .venv/bin/zerolora init --recipe smollm2-135m-benchmarks --force
    .venv/bin/snakemake --profile profiles/local all
    .venv/bin/python benchmarks/evaluate/public_benchmarks.py [--project DIRECTORY]

Writes benchmarks/results/public.json, puts its table into docs/tasks.md, and prints it.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from in_docs import put
from machine import machine

from zerolora.evaluate.difference import mcnemar
from zerolora.files import read_json, write_json

RESULT = Path(__file__).resolve().parents[1] / "results/public.json"
SHOWN = {
    "asdiv": ("ASDiv", "accuracy"),
    "boolq": ("BoolQ", "accuracy"),
    "mmlu": ("MMLU", "accuracy"),
    "piqa": ("PIQA", "accuracy_norm"),
    "xsum": ("XSum", "rougeL"),
}
"""Name and metric of each task in the table."""


def main() -> None:
    """Collect, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path())
    results = parser.parse_args().project / "results"
    result: dict[str, Any] = {"machine": machine(), "tasks": {}}
    for task in SHOWN:
        places = {"base": results / "base/reference/tasks", "tuned": results / "default/tasks"}
        rights = [
            [row["right"] for row in read_json(place / f"{task}.answers.json", "snakemake")]
            for place in places.values()
        ]
        gained = sum(after > before for before, after in zip(*rights, strict=True))
        lost = sum(after < before for before, after in zip(*rights, strict=True))
        result["tasks"][task] = {
            **{name: read_json(place / f"{task}.json", "snakemake") for name, place in places.items()},
            **{"gained": gained, "lost": lost, "p": mcnemar(gained, lost)},
        }
    write_json(RESULT, result)
    put("tasks.md", "public benchmarks", markdown(result))
    print(markdown(result))


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table of a result."""
    lines = ["| task | rows | metric | base | tuned | gained, lost | p |", "|---|---|---|---|---|---|---|"]
    for task, (name, metric) in SHOWN.items():
        if task not in found["tasks"]:
            continue
        row = found["tasks"][task]
        pairs = f"{row['gained']}, {row['lost']} | {row['p']:.2g}" if metric == "accuracy" else " | "
        lines.append(
            f"| {name} | {row['base']['rows']} | `{metric}` | {_interval(row['base'], metric)} | "
            f"{_interval(row['tuned'], metric)} | {pairs} |"
        )
    return "\n".join(lines)


def _interval(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} ({metrics[f'{name}_low']:.3f} to {metrics[f'{name}_high']:.3f})"


if __name__ == "__main__":
    main()
