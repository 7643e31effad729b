"""Collect the result of the recipe gemma-3-270m-boolq: base and tuned model on the same held-out questions.

    .venv/bin/zerolora init --recipe gemma-3-270m-boolq --force
    .venv/bin/snakemake --profile profiles/local all
    .venv/bin/python benchmarks/evaluate/boolq.py [--project DIRECTORY]

Writes benchmarks/results/boolq.json and prints the table of the recipe's README.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import RESULTS, machine, parser_of, table

from zerolora.files import read_json, write_json


def main() -> None:
    """Collect, write, print."""
    parser = parser_of(__doc__)
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
    write_json(RESULTS / "boolq.json", result)
    print(markdown(result))


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table of a result."""
    metrics = result["difference"]
    most, count = max(result["expected"].items(), key=lambda item: item[1])
    questions = sum(result["expected"].values())
    rows = [
        ("base model", _share(metrics, "base_accuracy"), f"{metrics['base_loss']:.3f}"),
        ("fine-tuned", _share(metrics, "accuracy"), f"{metrics['loss']:.3f}"),
        (f"always {most}", f"{count / questions:.3f}", ""),
    ]
    return table([f"{questions} test questions", "accuracy, 95 % interval", "loss"], rows)


def _share(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} ({metrics[f'{name}_low']:.3f} to {metrics[f'{name}_high']:.3f})"


if __name__ == "__main__":
    main()
