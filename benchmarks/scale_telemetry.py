"""What the charts of telemetry.csv on a run's page cost, by its rows, one a step. benchmarks/scale.py asks for sizes.

The rows are those of a real run (tests/finished_run), again and again, with their steps counted on.
"""

import csv
import tempfile
import time
from pathlib import Path
from typing import Any

from zerolora.report import figures

REAL = Path(__file__).resolve().parent.parent / "tests/finished_run/default/metrics/telemetry.csv"


def measure(rows: int) -> dict[str, Any]:
    """Return the CPU and wall seconds of reading so many rows and drawing their charts, and the bytes of these."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "telemetry.csv"
        write(table, rows)
        drawn(table)  # the first picture of a process loads Vega, whatever the rows are
        cpu, wall = time.process_time(), time.monotonic()
        part = drawn(table)
        seconds = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.monotonic() - wall}
    return {
        "charts": {name: round(value, 3) for name, value in seconds.items()},
        "charts_on_page": {"bytes": len(part.encode())},
    }


def write(table: Path, rows: int) -> None:
    """Write a telemetry.csv of so many rows."""
    with REAL.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        real, names = list(reader), list(reader.fieldnames or ())
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(real[index % len(real)] | {"step": str(index + 1)} for index in range(rows))


def drawn(table: Path) -> str:
    """Return the charts of a telemetry.csv as the page has them: each as a picture and as a spec."""
    return "".join(chart.svg() + chart.json() for chart in (*figures.step_times(table), *figures.load(table)))
