"""What a comparison of many runs takes: seconds and size of the stage compare, by the number of runs.

    .venv/bin/python benchmarks/many_runs.py --row results/compare/rows/default.json

Every run has a copy of this row, with figures of its own. Writes benchmarks/results/many_runs.json. CPU seconds of a
process of its own, with what it imports.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

from zerolora.files import canonical, read_json, write_json, write_text

RESULT = Path(__file__).resolve().parent / "results/many_runs.json"
COUNTS = (1, 10, 100, 1000)


def main() -> None:
    """Compare each number of runs once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", type=Path, required=True)
    row = read_json(parser.parse_args().row, "zerolora report")
    result = {"machine": machine(), "runs": {str(count): measured(row, count) for count in COUNTS}}
    write_json(RESULT, result)
    for count, figures in result["runs"].items():
        print(f"{count} runs: {figures}")


def measured(row: dict[str, Any], count: int) -> dict[str, float]:
    """Return the CPU seconds of comparing `count` runs, and the bytes of the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {f"run_{position:04}": {"train.lora.r": 2 ** (1 + position % 6)} for position in range(count)}
        for position, run in enumerate(runs):
            factor = 0.5 + (position * 37 % 100) / 67  # every run has figures of its own
            varied = {key: value * factor if isinstance(value, float) else value for key, value in row.items()}
            write_json(folder / f"rows/{run}.json", varied)
        write_text(folder / "settings.json", canonical({"runs": runs}))
        command = [sys.executable, "-m", "zerolora", "compare", "--settings", f"@{folder}/settings.json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--rows", f"{folder}/rows", "--output", str(folder)], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return {"cpu_seconds": round(seconds, 2), "page_bytes": (folder / "index.html").stat().st_size}


if __name__ == "__main__":
    main()
