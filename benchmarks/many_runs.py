"""Measure the stage compare by the number of runs: CPU seconds, imports included, and size of the page.

    .venv/bin/python benchmarks/many_runs.py --row results/compare/rows/default.json

Every run has a copy of this row with other figures. Writes benchmarks/results/many_runs.json.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, machine, parser_of, timed

from zerolora.files import canonical, read_json, write_json, write_text

COUNTS = (1, 10, 100, 1000)


def main() -> None:
    """Compare each number of runs once."""
    parser = parser_of(__doc__)
    parser.add_argument("--row", type=Path, required=True)
    row = read_json(parser.parse_args().row, "zerolora stage report")
    result = {"machine": machine(), "runs": {str(count): measured(row, count) for count in COUNTS}}
    write_json(RESULTS / "many_runs.json", result)
    for count, figures in result["runs"].items():
        print(f"{count} runs: {figures}")


def measured(row: dict[str, Any], count: int) -> dict[str, float]:
    """Return the CPU seconds of comparing `count` runs, and the bytes of the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {f"run_{position:04}": {"train.lora.r": 2 ** (1 + position % 6)} for position in range(count)}
        for position, run in enumerate(runs):
            factor = 0.5 + (position * 37 % 100) / 67
            varied = {key: value * factor if isinstance(value, float) else value for key, value in row.items()}
            write_json(folder / f"rows/{run}.json", varied)
        write_text(folder / "settings.json", canonical({"runs": runs}))
        command = [sys.executable, "-m", "zerolora", "stage", "compare", "--settings", f"@{folder}/settings.json"]
        seconds = timed([*command, "--rows", f"{folder}/rows", "--output", str(folder)], ROOT).cpu_seconds
        return {"cpu_seconds": round(seconds, 2), "page_bytes": (folder / "index.html").stat().st_size}


if __name__ == "__main__":
    main()
