"""Collect the results of the recipe smollm2-135m-own-answers.

    .venv/bin/zerolora init --recipe smollm2-135m-own-answers --force
    .venv/bin/snakemake --profile profiles/local all
    .venv/bin/python benchmarks/own_answers.py [--project DIRECTORY]

Writes benchmarks/results/own_answers.json and prints the table of the recipe's README, and what it says of the answers.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import RESULTS, machine, parser_of, table

from zerolora.files import read_json, write_json
from zerolora.report.repeats import SeedGroup, difference_of

RUNS = {
    "given": "given answers",
    "right": "own right answers",
    "unselected": "own answers, unselected",
    "distilled": "given answers, and the longer model's probabilities",
}
SEEDS = ("", "-seed43", "-seed44")
BEFORE = "first"
TEACHER = "longer"


def main() -> None:
    """Collect, write, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--project", type=Path, default=Path())
    result = collected(parser.parse_args().project)
    write_json(RESULTS / "own_answers.json", result)
    print(markdown(result), answers(result), sep="\n\n")


def collected(project: Path) -> dict[str, Any]:
    """Return the figures of every run, and of the answers."""
    results = project / "results"

    def accuracy(run: str) -> float:
        return float(read_json(results / run / "metrics/evaluate.json", "snakemake")["accuracy"])

    selected = read_json(results / "selections/right/metrics.json", "snakemake")
    return {
        "machine": machine(),
        "base": read_json(results / "base/reference/evaluate.json", "snakemake")["accuracy"],
        "before": accuracy(BEFORE),
        "teacher": accuracy(TEACHER),
        "test_rows": read_json(results / BEFORE / "metrics/evaluate.json", "snakemake")["rows"],
        "selected": {name: selected[name] for name in ("prompts", "samples", "rows", "pass_at_1", "pass_at_4")},
        "runs": {run: [accuracy(run + seed) for seed in SEEDS] for run in RUNS},
    }


def answers(result: Mapping[str, Any]) -> str:
    """Return a sentence of the sampled answers."""
    each = result["selected"]
    rates = ", ".join(f"pass@{count} was {each[f'pass_at_{count}']:.3f}" for count in (1, 4))
    return f"{each['prompts']} prompts were asked; {rates}, and {each['rows']} had a right answer to train on."


def groups_of(result: Mapping[str, Any]) -> dict[str, SeedGroup]:
    """Return the accuracies of each column."""
    return {run: SeedGroup((run,), tuple(values)) for run, values in result["runs"].items()}


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table of a result: means of the seeds, and differences from the given answers."""
    groups = groups_of(result)
    rows = [("none: the run `first`", "", f"{result['before']:.3f}", "", "")]
    for run, name in RUNS.items():
        group = groups[run]
        low, high = group.interval()
        against = ""
        if run != "given":
            middle, *ends = difference_of([*groups.values()], groups["given"], group)
            against = f"{middle:+.3f} ({ends[0]:+.3f} to {ends[1]:+.3f})"
        each = ", ".join(f"{value:.3f}" for value in group.values)
        rows.append((name, each, f"{group.mean:.3f}", f"{low:.3f} to {min(high, 1):.3f}", against))
    rows.append(("none: the teacher, the run `longer`", "", f"{result['teacher']:.3f}", "", ""))
    return table(["ten steps on", "three seeds", "mean", "95 % interval", "difference from given answers"], rows)


if __name__ == "__main__":
    main()
