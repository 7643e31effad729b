"""Collect what the recipe gemma-3-270m-boolq measured: base and tuned on the same held-out questions.

    .venv/bin/zerolora init --recipe gemma-3-270m-boolq --force
    .venv/bin/snakemake --profile profiles/local all
    .venv/bin/python benchmarks/evaluate/boolq.py [--project DIRECTORY]

Writes benchmarks/results/boolq.json and prints its table, as in the recipe's README.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import machine

from zerolora.files import read_json, write_json

RESULT = Path(__file__).resolve().parents[1] / "results/boolq.json"


def main() -> None:
    """Collect, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path())
    run = parser.parse_args().project / "results/lora"
    answers = read_json(run / "answers.json", "snakemake")
    expected = Counter(row["expected"] for row in answers)
    result = {
        "machine": machine(),
        "difference": read_json(run / "metrics/difference.json", "snakemake"),
        "training": read_json(run / "metrics/train.json", "snakemake"),
        "resources": read_json(run / "metrics/train_resources.json", "snakemake"),
        "expected": dict(expected),
        "answered": dict(Counter(row["answer"].strip() for row in answers).most_common(5)),
    }
    write_json(RESULT, result)
    print(markdown(result))


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table of a result."""
    metrics = found["difference"]
    most, count = max(found["expected"].items(), key=lambda item: item[1])
    rows = sum(found["expected"].values())
    lines = [
        f"| {rows} test questions | accuracy, 95 % interval | loss |",
        "|---|---|---|",
        f"| base model | {_share(metrics, 'base_accuracy')} | {metrics['base_loss']:.3f} |",
        f"| fine-tuned | {_share(metrics, 'accuracy')} | {metrics['loss']:.3f} |",
        f"| always {most} | {count / rows:.3f} |  |",
    ]
    return "\n".join(lines)


def _share(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} ({metrics[f'{name}_low']:.3f} to {metrics[f'{name}_high']:.3f})"


if __name__ == "__main__":
    main()
