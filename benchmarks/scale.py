"""How the cost of the pipeline grows: with runs, rows of telemetry, data sets, and rows of a data set.

    .venv/bin/python benchmarks/scale.py --project DIR

DIR is a project in which `make run` has ended; each size is measured in a copy of it. Measures

- planning a grid of so many runs and starting with nothing to do, with both engines (scale_runs.py);
- the same for so many data sets (scale_data_sets.py);
- reading so many rows of telemetry.csv and drawing their charts (scale_telemetry.py);

and takes the seconds of preparing rows from benchmarks/results/prepare_memory.json, which prepare_memory.py measures.
Writes benchmarks/results/scale.json and scale.svg, and puts tables into docs/scale.md and docs/grids.md.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import scale_data_sets
import scale_runs
import scale_telemetry
from in_docs import put
from machine import machine

from zerolora.files import read_json, write_json, write_text
from zerolora.report.charts import Chart

RESULTS = Path(__file__).resolve().parent / "results"
RESULT = RESULTS / "scale.json"
PREPARED = RESULTS / "prepare_memory.json"
SUBJECTS = {
    "runs": "runs of a grid",
    "data_sets": "data sets, each with a run",
    "telemetry_rows": "rows of telemetry.csv",
    "prepared_rows": "rows of a data set",
}
FIGURES = {name: f"`{command}`" for name, command in scale_runs.COMMANDS.items()} | {
    "charts": "charts of the run's page",
    "prepare": "`zerolora prepare`",
}
LINES = {
    ("runs", "snakemake_plan"): "runs, planned by Snakemake",
    ("runs", "dvc_status"): "runs, DVC's status",
    ("data_sets", "snakemake_plan"): "data sets, planned by Snakemake",
    ("data_sets", "dvc_status"): "data sets, DVC's status",
    ("telemetry_rows", "charts"): "rows of telemetry, drawn",
    ("prepared_rows", "prepare"): "rows, prepared (wall time)",
}
"""What is drawn, by subject and figure."""
SECONDS = ("cpu_seconds", "wall_seconds")
SECTION = """\
## Cost of the pipeline itself

Measured, unlike the rest of this page (`benchmarks/scale.py`, [scale.json](../benchmarks/results/scale.json):
{machine}).

![cost by size, on logarithmic scales](../benchmarks/results/scale.svg)

{table}

- **Exponent**: the slope of a least-squares fit of log cost against log size, over the two largest sizes. 1 is
  proportional; it is less where a start, which costs the same at any size, is a part of the cost. The cost is CPU time,
  of `zerolora prepare` wall time.
- **Runs, data sets**: the engines find nothing to do, but for the dry run, which plans all, and for `dvc commit`. Their
  results are small files of made-up content; a data set is a file with one row, but for the first one.
- **Rows of telemetry**: one a step; without loading Vega. The charts take {kilobytes} kB of the page (exponent
  {page_exponent}).
- **Rows of a data set**: from [prepare_memory.json](../benchmarks/results/prepare_memory.json), measured on
  {prepared}."""
SECTION_OF_RUNS = """\
CPU-seconds of the engines for a grid of so many runs, with results of made-up content
([scale.json](../benchmarks/results/scale.json), `benchmarks/scale.py`); each of the middle three finds nothing to do:

{table}"""
Found = dict[str, Any]


def main() -> None:
    """Measure, write, draw."""
    options = _options()
    project = options.project.resolve()

    def with_dvc(size: int) -> bool:
        return size <= options.most_dvc

    result: Found = {
        "machine": machine(("snakemake", "dvc", "pydantic", "vl-convert-python")),
        "runs": grown(options.runs, lambda size: scale_runs.measure(project, size, with_dvc(size))),
        "data_sets": grown(options.data_sets, lambda size: scale_data_sets.measure(project, size, with_dvc(size))),
        "telemetry_rows": grown(options.telemetry_rows, scale_telemetry.measure),
        "prepared_rows": prepared_rows(),
    }
    write_json(options.output, result)
    write_text(options.output.with_suffix(".svg"), chart(result).svg() + "\n")
    if options.output == RESULT:
        put("scale.md", "cost of the pipeline", section(result))
        put("grids.md", "cost of runs", section_of_runs(result))


def grown(sizes: Sequence[int], measure: Callable[[int], Found]) -> Found:
    """Return the figures of each size, and their exponents."""
    rows = []
    for size in sorted(sizes):
        rows.append({"size": size} | measure(size))
        print(json.dumps(rows[-1]), flush=True)
    return {"sizes": rows, "exponents": exponents(rows)}


def prepared_rows() -> Found:
    """Return the wall seconds of `zerolora prepare` by rows, with the machine and the date of that measurement."""
    measured = read_json(PREPARED, "benchmarks/prepare_memory.py")
    rows = [{"size": run["rows"], "prepare": {"wall_seconds": run["seconds"]}} for run in measured["runs"]]
    return {"machine": measured["machine"], "sizes": rows, "exponents": exponents(rows)}


def exponents(rows: Sequence[Found]) -> dict[str, float]:
    """Return by figure the slope of a least-squares fit of log cost against log size, over the two largest sizes."""
    result = {}
    for name in {name for row in rows for name in row if isinstance(row[name], dict)}:
        points = sorted((row["size"], cost(row[name])) for row in rows if name in row)[-2:]
        if len(points) == 2:  # and so the fit is the line through both
            (few, less), (many, more) = points
            result[name] = round(math.log(more / less) / math.log(many / few), 2)
    return result


def cost(figure: dict[str, float]) -> float:
    """Return the CPU seconds of a figure, or what it has in their place."""
    return next(figure[unit] for unit in (*SECONDS, "bytes") if unit in figure)


def table(found: Found) -> str:
    """Return the table of docs/scale.md."""
    lines = [
        "| number of | what is done | sizes | CPU-seconds | wall seconds | exponent |",
        "|---|---|---|---|---|---|",
    ]
    for subject, counted in SUBJECTS.items():
        for name, done in FIGURES.items():
            rows = [row for row in found[subject]["sizes"] if name in row]
            if rows:
                sizes = " / ".join(f"{row['size']:,}" for row in rows)
                cells = [counted, done, sizes, *(_listed([row[name].get(unit) for row in rows]) for unit in SECONDS)]
                exponent = found[subject]["exponents"].get(name)
                lines.append(f"| {' | '.join(cells)} | {'' if exponent is None else f'{exponent:.2f}'} |")
    return "\n".join(lines)


def _listed(seconds: Sequence[float | None]) -> str:
    return " / ".join(f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in seconds if each is not None)


def section(found: Found) -> str:
    """Return what docs/scale.md says of a result."""
    charts = found["telemetry_rows"]
    return SECTION.format(
        machine=_on(found["machine"]),
        table=table(found),
        kilobytes=" / ".join(f"{row['charts_on_page']['bytes'] / 1000:,.0f}" for row in charts["sizes"]),
        page_exponent=charts["exponents"]["charts_on_page"],
        prepared=_on(found["prepared_rows"]["machine"]),
    )


def section_of_runs(found: Found) -> str:
    """Return what docs/grids.md says of a result."""
    return SECTION_OF_RUNS.format(table=scale_runs.table(found["runs"]["sizes"]))


def _on(machine: Found) -> str:
    return f"{machine['cores']} cores, {machine['processor']}, {machine['date']}"


def chart(found: Found) -> Chart:
    """Return the cost by size, both on logarithmic scales, with a line for each of LINES."""
    rows = [
        {"line": line, "size": row["size"], "seconds": cost(row[name])}
        for (subject, name), line in LINES.items()
        for row in found[subject]["sizes"]
        if name in row
    ]
    scale = {"type": "log"}
    line = {"field": "line", "type": "nominal", "scale": {"domain": list(LINES.values())}}
    size = {"field": "size", "type": "quantitative", "scale": scale, "axis": {"format": ",", "grid": True}}
    seconds = {"field": "seconds", "type": "quantitative", "title": "CPU-seconds", "scale": scale}
    spec = {
        "background": "white",  # the picture is a file: it cannot follow the scheme of the page around it
        "height": 320,
        "data": {"values": rows},
        "mark": {"type": "line", "point": {"filled": True, "size": 60}},
        "encoding": {
            "x": size,
            "y": seconds | {"axis": {"format": "~g"}},
            "color": line | {"legend": {"columns": 3}},
            "shape": line,
        },
    }
    return Chart("scale", "Cost by size.", "", spec)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--data-sets", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--telemetry-rows", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--most-dvc", type=int, default=100, help="ask DVC only up to so many runs or data sets")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
