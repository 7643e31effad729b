"""Collect every strategy that two CPU ranks can run, on SmolLM2-135M: the table of docs/compare.md.

    .venv/bin/zerolora init --recipe smollm2-135m-strategies --force
    make run
    .venv/bin/python benchmarks/strategies.py --results results

Writes the rows of the comparison and the machine to benchmarks/results/strategies.json, a table to docs/compare.md,
with the published experiment's figures of its four strategies, and one of these four to docs/tutorial.md. Steps
and tokens/s are medians. Times mean little if other processes ran meanwhile.
"""

import csv
import statistics
from pathlib import Path
from typing import Any

from measuring import RESULTS, machine, parser_of, put, table

from zerolora.files import read_json, write_json
from zerolora.strategies import STRATEGIES
from zerolora.units import byte_size, gib

# "Multi-GPU DeepSpeed + LoRA fine-tuning of Qwen2.5-14B-Instruct", two GPUs of 32 GB: (time of training, CPU use).
# Its stage 2 has the optimizer on the host, its stage 3 optimizer and parameters.
PUBLISHED = {
    "zero0": ("1 min 54 s", "7.6 %"),
    "zero1": ("1 min 52 s", "8.5 %"),
    "zero2_offload": ("1 min 54 s", "9 %"),
    "zero3_offload": ("12 min", "11.5 %"),
}
FIGURES = (
    "strategy",
    "steps",
    "step_seconds",
    "predicted_step_seconds",
    "wall_seconds",
    "tokens_per_second",
    "measured_host_bytes",
    "predicted_host_bytes",
    "communication_bytes",
    "cpu_percent",
    "loss_validation",
)


def main() -> None:
    """Collect the rows, write the result and the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, required=True)
    results = parser.parse_args().results
    rows = [row_of(path, results) for path in sorted((results / "compare/rows").glob("*.json"))]
    rows.sort(key=lambda row: list(STRATEGIES).index(row["strategy"]))
    values = {"machine": machine(), "runs": [{name: row[name] for name in FIGURES} for row in rows]}
    write_json(RESULTS / "strategies.json", values)
    put("compare.md", "strategies", section(values))
    put("tutorial.md", "strategies", published_table(values))


def row_of(path: Path, results: Path) -> dict[str, Any]:
    """Return a run's row with the medians of its steps; the first step also reads the weights."""
    row: dict[str, Any] = read_json(path, "zerolora stage report")
    with (results / path.stem / "metrics/telemetry.csv").open(encoding="utf-8", newline="") as file:
        steps = [(float(line["seconds"]), float(line["tokens_per_second"])) for line in csv.DictReader(file)]
    seconds, rates = zip(*steps, strict=True)
    return row | {"step_seconds": statistics.median(seconds), "tokens_per_second": statistics.median(rates)}


def section(result: dict[str, Any]) -> str:
    """Return the section of docs/compare.md: the table, with the published figures in its last two columns."""
    header = ["strategy", "step", "predicted", "wall time", "tokens/s", "host memory", "predicted", "sent a step"]
    rows = [
        (
            f"`{run['strategy']}`",
            f"{run['step_seconds']:.2f} s",
            f"{run['predicted_step_seconds']:.2f} s",
            f"{run['wall_seconds']:.0f} s",
            f"{run['tokens_per_second']:.0f}",
            gib(run["measured_host_bytes"]),
            gib(run["predicted_host_bytes"]),
            byte_size(run["communication_bytes"]),
            *PUBLISHED.get(run["strategy"], ("", "")),
        )
        for run in result["runs"]
    ]
    where = f"{result['machine']['cores']} cores ({result['machine']['processor']}), {result['machine']['date']}"
    lines = table([*header, "published: time", "CPU"], rows, right=len(header) + 1)
    how = "`benchmarks/strategies.py`; steps and tokens/s are medians of six steps"
    return f"{lines}\n\nMeasured on {where}, by {how}."


def published_table(result: dict[str, Any]) -> str:
    """Return docs/tutorial.md's table of the published strategies, with the machine in its header."""
    here, day = f"{result['machine']['cores']} cores, no GPU", result["machine"]["date"]
    header = ("strategy", f"a step on {here}, {day}", "wall time", "CPU", "host memory", "published: time", "CPU")
    rows = [
        (
            f"`{run['strategy']}`",
            f"{run['step_seconds']:.2f} s",
            f"{run['wall_seconds']:.0f} s",
            f"{run['cpu_percent']:.0f} %",
            gib(run["measured_host_bytes"]),
            *PUBLISHED[run["strategy"]],
        )
        for run in result["runs"]
        if run["strategy"] in PUBLISHED
    ]
    return table(header, rows, right=len(header) - 1)


if __name__ == "__main__":
    main()
