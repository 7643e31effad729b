"""Every strategy that two CPU ranks of one machine can run, on SmolLM2-135M: the table of docs/compare.md.

    zerolora init --recipe smollm2-135m-strategies --force
    make run
    .venv/bin/python benchmarks/strategies.py --results results

Collects the rows of the comparison with the machine in benchmarks/results/strategies.json, and writes the table into
docs/compare.md, beside what the published experiment says of its four strategies, and that of these four into the
README. Steps and tokens/s are medians. Times say little beside other work.
"""

import argparse
import csv
import re
import statistics
from pathlib import Path
from typing import Any

from in_docs import put
from machine import machine

from zerolora.files import read_json, write_json, write_text
from zerolora.strategies import STRATEGIES
from zerolora.units import byte_size, gib

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/strategies.json"
PAGE = ROOT / "docs/compare.md"
BETWEEN = re.compile(r"(<!-- strategies -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet; `benchmarks/strategies.py` writes the table here."
# "Multi-GPU DeepSpeed + LoRA fine-tuning of Qwen2.5-14B-Instruct", two GPUs of 32 GB: (seconds of training, CPU use).
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
    """Collect the rows, write the result file, and the table into the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, required=True)
    results = parser.parse_args().results
    rows = [row_of(path, results) for path in sorted((results / "compare/rows").glob("*.json"))]
    rows.sort(key=lambda row: list(STRATEGIES).index(row["strategy"]))
    values = {"machine": machine(), "runs": [{name: row[name] for name in FIGURES} for row in rows]}
    write_json(RESULT, values)
    write_text(PAGE, written(PAGE.read_text(encoding="utf-8"), values))
    put("../README.md", "strategies", published_table(values))


def row_of(path: Path, results: Path) -> dict[str, Any]:
    """Return a run's row, with the median of its steps: the first of so few is slow, since weights are read then."""
    row: dict[str, Any] = read_json(path, "zerolora report")
    with (results / path.stem / "metrics/telemetry.csv").open(encoding="utf-8", newline="") as file:
        steps = [(float(line["seconds"]), float(line["tokens_per_second"])) for line in csv.DictReader(file)]
    seconds, rates = zip(*steps, strict=True)
    return row | {"step_seconds": statistics.median(seconds), "tokens_per_second": statistics.median(rates)}


def written(page: str, found: dict[str, Any] | None) -> str:
    """Return the page with the table of a result, None for none, between its marks."""
    text = NOT_MEASURED
    if found:
        measured_on = f"{found['machine']['cores']} cores ({found['machine']['processor']}), {found['machine']['date']}"
        how = "`benchmarks/strategies.py`; steps and tokens/s are medians of six steps"
        text = f"{table(found)}\n\nMeasured on {measured_on}, by {how}."
    return BETWEEN.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def table(found: dict[str, Any]) -> str:
    """Return the measured table, with the published figures in its last two columns."""
    header = ("strategy", "step", "predicted", "wall time", "tokens/s", "host memory", "predicted", "sent a step")
    lines = [f"| {' | '.join((*header, 'published: time', 'CPU'))} |", "|---|" + "---:|" * (len(header) + 1)]
    for run in found["runs"]:
        cells = (
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
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def published_table(found: dict[str, Any]) -> str:
    """Return the table of the published strategies alone, with the machine in its header."""
    here, day = f"{found['machine']['cores']} cores, no GPU", found["machine"]["date"]
    header = ("strategy", f"a step on {here}, {day}", "wall time", "CPU", "host memory", "published: time", "CPU")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for run in found["runs"]:
        if run["strategy"] in PUBLISHED:
            cells = (
                f"`{run['strategy']}`",
                f"{run['step_seconds']:.2f} s",
                f"{run['wall_seconds']:.0f} s",
                f"{run['cpu_percent']:.0f} %",
                gib(run["measured_host_bytes"]),
                *PUBLISHED[run["strategy"]],
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
