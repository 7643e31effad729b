"""Measure how the cost of the pipeline grows: with runs, data sets, rows of telemetry, and rows of a data set.

    .venv/bin/python benchmarks/scale.py --project DIR

DIR is a project in which `make run` has ended; each size is measured in its own copy. Measures

- planning a grid of so many runs, and starting with nothing to do, under both engines;
- the same for so many data sets, each a file with one row and a run, since `all` skips a data set without a run;
- reading so many rows of telemetry.csv, one a step, and drawing their charts;

and takes the seconds of preparing rows from benchmarks/results/prepare_memory.json, which prepare_memory.py writes.
Config, model and first data set go through their stages. The files of all other jobs are small and made up, and both
engines are told to take them for results. Other processes hardly disturb CPU seconds; they do disturb wall seconds.
Writes benchmarks/results/scale.json and scale.svg, and puts tables into docs/scale.md and docs/grids.md.
"""

import csv
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import measuring
import yaml
from measuring import RESULTS, ROOT, machine, parser_of, put

from zerolora.files import read_json, write_json, write_text
from zerolora.report import figures
from zerolora.report.charts import Chart

RESULT = RESULTS / "scale.json"
PREPARED = RESULTS / "prepare_memory.json"
TELEMETRY = ROOT / "tests/finished_run/default/metrics/telemetry.csv"
BIN = Path(sys.executable).parent
SNAKEMAKE = [str(BIN / "snakemake"), "--profile", "profiles/local"]
DVC = str(BIN / "dvc")
OUTPUT = re.compile(r"^    output: (.+)$", re.MULTILINE)
NOTHING = "Nothing to be done"
CLEAN = "Data and pipelines are up to date."
COMMANDS = {
    "snakemake_plan": "snakemake --dry-run all",
    "snakemake_no_op": "snakemake all",
    "dvc_status": "dvc status",
    "dvc_repro_no_op": "dvc repro",
    "dvc_commit": "dvc commit --force",
}
"""The timed commands by the name of their figure."""
SUBJECTS = {
    "runs": "runs of a grid",
    "data_sets": "data sets, each with a run",
    "telemetry_rows": "rows of telemetry.csv",
    "prepared_rows": "rows of a data set",
}
FIGURES = {name: f"`{command}`" for name, command in COMMANDS.items()} | {
    "charts": "charts of the run's page",
    "prepare": "`zerolora stage prepare`",
}
LINES = {
    ("runs", "snakemake_plan"): "runs, planned by Snakemake",
    ("runs", "dvc_status"): "runs, DVC's status",
    ("data_sets", "snakemake_plan"): "data sets, planned by Snakemake",
    ("data_sets", "dvc_status"): "data sets, DVC's status",
    ("telemetry_rows", "charts"): "rows of telemetry, drawn",
    ("prepared_rows", "prepare"): "rows, prepared (wall time)",
}
"""The lines of the plot, by subject and figure."""
SECONDS = ("cpu_seconds", "wall_seconds")
SECTION = """\
## Cost of the pipeline itself

Measured, unlike the rest of this page (`benchmarks/scale.py`, [scale.json](../benchmarks/results/scale.json):
{machine}).

![cost by size, on logarithmic scales](../benchmarks/results/scale.svg)

{table}

- **Exponent**: the slope of a least-squares fit of log cost against log size, over the two largest sizes. 1 is
  proportional; it is lower where the start, whose cost does not depend on the size, is part of the cost. The cost is
  CPU time, for `zerolora stage prepare` wall time.
- **Runs, data sets**: the engines have nothing to do, except for the dry run, which plans everything, and `dvc commit`.
  The results are small files of made-up content; each data set but the first is a file with one row.
- **Rows of telemetry**: one a step; loading Vega is not counted. The charts take {kilobytes} kB of the page (exponent
  {page_exponent}).
- **Rows of a data set**: from [prepare_memory.json](../benchmarks/results/prepare_memory.json), measured on
  {prepared}."""
SECTION_OF_RUNS = """\
CPU-seconds of the engines for a grid of so many runs with made-up results
([scale.json](../benchmarks/results/scale.json), `benchmarks/scale.py`); the middle three have nothing to do:

{table}"""
MARK = """
import sys
import snakemake.cli, snakemake.workflow
build = snakemake.workflow.Workflow._build_dag
def build_and_mark(workflow):
    build(workflow)
    dag, sync = workflow.dag, workflow.globals["SYNC"]
    async def mark():
        for job in (job for level in dag.toposorted() for job in level):
            if job.output:
                for file in job.output:
                    file.touch()
                await dag.workflow.persistence.finished(job)
                sync._end_job(job)
    workflow.async_run(mark())
    sys.exit(0)
snakemake.workflow.Workflow._build_dag = build_and_mark
snakemake.cli.main(sys.argv[1:])
"""
"""Makes Snakemake take all files for results; `snakemake --touch` does too, but plans again after each job."""
Figures = dict[str, Any]


def main() -> None:
    """Measure, write, draw."""
    parser = parser_of(__doc__)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--data-sets", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--telemetry-rows", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--most-dvc", type=int, default=100, help="time DVC only up to so many runs or data sets")
    options = parser.parse_args()

    def in_copy(write: Callable[[Path, int], str]) -> Callable[[int], Figures]:
        return lambda size: engines(options.project.resolve(), write, size, size <= options.most_dvc)

    result: Figures = {
        "machine": machine(("snakemake", "dvc", "pydantic", "vl-convert-python")),
        "runs": grown(options.runs, in_copy(write_grid)),
        "data_sets": grown(options.data_sets, in_copy(write_data_sets)),
        "telemetry_rows": grown(options.telemetry_rows, telemetry),
        "prepared_rows": prepared_rows(),
    }
    write_json(RESULT, result)
    write_text(RESULT.with_suffix(".svg"), chart(result).svg() + "\n")
    put("scale.md", "cost of the pipeline", section(result))
    put("grids.md", "cost of runs", section_of_runs(result))


# Measuring


def grown(sizes: Sequence[int], measure: Callable[[int], Figures]) -> Figures:
    """Return the figures of each size, and their exponents."""
    rows = []
    for size in sorted(sizes):
        rows.append({"size": size} | measure(size))
        print(json.dumps(rows[-1]), flush=True)
    return {"sizes": rows, "exponents": exponents(rows)}


def engines(project: Path, write: Callable[[Path, int], str], size: int, dvc: bool) -> Figures:
    """Return the number of jobs and the times of COMMANDS, DVC's if `dvc`, in a copy of a project.

    `write` writes the config of that size and returns the data set to prepare.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder).resolve() / "project"
        shutil.copytree(project, directory, symlinks=True, ignore=shutil.ignore_patterns(".venv"))
        dataset = write(directory, size)
        timed([*SNAKEMAKE, "results/config.json", f"results/data/{dataset}/manifest.json"], directory)
        plan, printed = timed([*SNAKEMAKE, "--dry-run", "all"], directory)
        jobs = make_up(directory, printed, dataset)
        timed([sys.executable, "-c", MARK, "--cores", "1", "--forceall", "all"], directory)
        no_op, _ = timed([*SNAKEMAKE, "all"], directory, NOTHING)
        result: Figures = {"jobs": jobs, "snakemake_plan": plan, "snakemake_no_op": no_op}
        if dvc:
            result["dvc_commit"], _ = timed([DVC, "commit", "--force", "--quiet"], directory)
            result["dvc_status"], _ = timed([DVC, "status"], directory, CLEAN)
            result["dvc_repro_no_op"], _ = timed([DVC, "repro"], directory, CLEAN)
        return result


def timed(command: list[str], directory: Path, expected: str = "", **variables: str) -> tuple[dict[str, float], str]:
    """Return the CPU and wall seconds of a command, and its output."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    result = measuring.timed(command, directory, expected, PYTHONPATH=str(directory / "src"), PATH=path, **variables)
    seconds = {"cpu_seconds": round(result.cpu_seconds, 2), "wall_seconds": round(result.wall_seconds, 2)}
    return seconds, result.stdout + result.stderr


def write_grid(directory: Path, runs: int) -> str:
    """Replace the runs of a project's config with a grid of `runs` seeds, and return its data set."""
    path = directory / "config/config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    dataset = next(iter(config["prepare"]))
    config |= {"runs": {}, "continued": {}}
    config["grids"] = {f"seeds{runs}": {"dataset": dataset, "over": {"train.seed": list(range(runs))}}}
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(dataset)


def write_data_sets(directory: Path, data_sets: int) -> str:
    """Replace the data sets of a project's config with `data_sets` of the first one's settings; return the first."""
    path = directory / "config/config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    first, settings = next(iter(config["prepare"].items()))
    folder = Path("data/made_up")
    (directory / folder).mkdir(parents=True)
    config["prepare"] = {first: settings}
    for index in range(1, data_sets):
        file = folder / f"{index}.json"
        row = {"instruction": "Which data set is this?", "output": f"It is number {index}."}
        (directory / file).write_text(json.dumps([row]), encoding="utf-8")
        config["prepare"][f"{first}{index}"] = settings | {"path": str(file)}
    config |= {"runs": {name: {"dataset": name} for name in config["prepare"]}, "continued": {}, "grids": {}}
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(first)


def make_up(directory: Path, plan: str, dataset: str) -> int:
    """Write the missing output files of a plan's jobs; return the number of jobs. `dataset` is prepared."""
    jobs = OUTPUT.findall(plan)
    # Snakemake reads those of each data set, for the memory that an evaluation requests.
    statistics = json.loads((directory / f"results/data/{dataset}/stats.json").read_text(encoding="utf-8"))
    for name in (name for job in jobs for name in job.split(", ")):
        path = directory / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Contents differ: DVC would make equal files one, with one time.
            content = statistics if fnmatch(name, "results/data/*/stats.json") else {"files": {}}
            path.write_text(json.dumps(content | {"made up": name}) + "\n", encoding="utf-8")
    return len(jobs)


def telemetry(rows: int) -> Figures:
    """Return the seconds of reading so many rows and drawing their charts, and the bytes of the charts.

    The rows are those of a real run, repeated, with increasing steps.
    """
    with TELEMETRY.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        real, names = list(reader), list(reader.fieldnames or ())
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "telemetry.csv"
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(real[index % len(real)] | {"step": str(index + 1)} for index in range(rows))
        drawn(table)  # the first chart of a process loads Vega, however many rows there are
        cpu, wall = time.process_time(), time.monotonic()
        part = drawn(table)
        seconds = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.monotonic() - wall}
    return {
        "charts": {name: round(value, 3) for name, value in seconds.items()},
        "charts_on_page": {"bytes": len(part.encode())},
    }


def drawn(table: Path) -> str:
    """Return the charts of a telemetry.csv as the page has them: each as a picture and as a spec."""
    return "".join(chart.svg() + chart.json() for chart in (*figures.step_times(table), *figures.load(table)))


# Results


def prepared_rows() -> Figures:
    """Return the wall seconds of the stage `prepare` by rows, with the machine and the date of that measurement."""
    measured = read_json(PREPARED, "benchmarks/prepare_memory.py")
    rows = [{"size": run["rows"], "prepare": {"wall_seconds": run["seconds"]}} for run in measured["runs"]]
    return {"machine": measured["machine"], "sizes": rows, "exponents": exponents(rows)}


def exponents(rows: Sequence[Figures]) -> dict[str, float]:
    """Return by figure the slope of a least-squares fit of log cost against log size, over the two largest sizes."""
    result = {}
    for name in {name for row in rows for name in row if isinstance(row[name], dict)}:
        points = sorted((row["size"], cost(row[name])) for row in rows if name in row)[-2:]
        if len(points) == 2:  # and so the fit is the line through both
            (few, less), (many, more) = points
            result[name] = round(math.log(more / less) / math.log(many / few), 2)
    return result


def cost(figure: dict[str, float]) -> float:
    """Return a figure's CPU seconds, or its wall seconds or bytes where it has none."""
    return next(figure[unit] for unit in (*SECONDS, "bytes") if unit in figure)


def table(result: Figures) -> str:
    """Return the table of docs/scale.md."""
    header = ("number of", "command or step", "sizes", "CPU-seconds", "wall seconds", "exponent")
    lines = []
    for subject, counted in SUBJECTS.items():
        for name, step in FIGURES.items():
            if rows := [row for row in result[subject]["sizes"] if name in row]:
                sizes = " / ".join(f"{row['size']:,}" for row in rows)
                seconds = (_listed([row[name].get(unit) for row in rows]) for unit in SECONDS)
                exponent = result[subject]["exponents"].get(name)
                lines.append([counted, step, sizes, *seconds, "" if exponent is None else f"{exponent:.2f}"])
    return measuring.table(header, lines)


def _listed(seconds: Sequence[float | None]) -> str:
    return " / ".join(f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in seconds if each is not None)


def section(result: Figures) -> str:
    """Return the section of docs/scale.md."""
    charts = result["telemetry_rows"]
    return SECTION.format(
        machine=_on(result["machine"]),
        table=table(result),
        kilobytes=" / ".join(f"{row['charts_on_page']['bytes'] / 1000:,.0f}" for row in charts["sizes"]),
        page_exponent=charts["exponents"]["charts_on_page"],
        prepared=_on(result["prepared_rows"]["machine"]),
    )


def section_of_runs(result: Figures) -> str:
    """Return the section of docs/grids.md: CPU seconds of each command, by the number of runs."""
    rows = result["runs"]["sizes"]
    cells = [
        [f"`{command}`", *(f"{row[name]['cpu_seconds']:.1f}" if name in row else "" for row in rows)]
        for name, command in COMMANDS.items()
    ]
    header = ["command", *(f"{row['size']:,} runs" for row in rows)]
    return SECTION_OF_RUNS.format(table=measuring.table(header, cells))


def _on(machine: Figures) -> str:
    return f"{machine['cores']} cores, {machine['processor']}, {machine['date']}"


def chart(result: Figures) -> Chart:
    """Return the cost by size, both on logarithmic scales, with a line for each of LINES."""
    rows = [
        {"line": line, "size": row["size"], "seconds": cost(row[name])}
        for (subject, name), line in LINES.items()
        for row in result[subject]["sizes"]
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


if __name__ == "__main__":
    main()
