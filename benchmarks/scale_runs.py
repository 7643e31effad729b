"""What many runs cost the two engines: a plan, and a start with nothing to do.

    python3 benchmarks/scale_runs.py --project DIR --runs 1000 100 10

DIR is a copy of the project with any data set; its config gets a grid of seeds on the first one in place of its runs.
Config, model and data go through their stages. What the runs would write is made up: small files that no stage has
computed, which both engines are told to take for results. Writes CPU and wall seconds to
benchmarks/results/scale_runs.json, with the exponent of the cost in the runs between the two largest sizes. CPU seconds
are little disturbed by other processes of the machine; wall seconds are.
"""

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from machine import machine

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/scale_runs.json"
BIN = Path(sys.executable).parent
SNAKEMAKE = [str(BIN / "snakemake"), "--profile", "profiles/local"]
DVC = str(BIN / "dvc")
OUTPUT = re.compile(r"^    output: (.+)$", re.MULTILINE)
NOTHING = "Nothing to be done"
IMPORTING = "ZEROLORA_IMPORTING_DVC_STATE"  # tells Snakemake not to ask DVC (workflow/scripts/engine_sync.py)
CLEAN = "Data and pipelines are up to date."


MARK = """
import asyncio, sys
import snakemake.cli, snakemake.workflow
build = snakemake.workflow.Workflow._build_dag
def build_and_mark(workflow):
    build(workflow)
    dag, engine_sync = workflow.dag, sys.modules["engine_sync"]
    async def mark():
        for job in (job for level in dag.toposorted() for job in level):
            if job.output:
                for file in job.output:
                    file.touch()
                await dag.workflow.persistence.finished(job)
                engine_sync._record_job(workflow, job)
    workflow.async_run(mark())
    sys.exit(0)
snakemake.workflow.Workflow._build_dag = build_and_mark
snakemake.cli.main(sys.argv[1:])
"""
"""Has Snakemake take all files for those of its jobs; `snakemake --touch` does, but decides anew after each job."""


def timed(command: list[str], directory: Path, expected: str = "", **variables: str) -> tuple[dict[str, float], str]:
    """Return the CPU and wall seconds of a command and its children, and what it printed, `expected` among it."""
    environment = os.environ | {"PYTHONPATH": str(directory / "src"), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment |= variables
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    result = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    if result.returncode or expected not in result.stdout:
        sys.exit(f"{' '.join(command)} in {directory}: {result.stdout[-2000:]}")
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"cpu_seconds": round(cpu, 2), "wall_seconds": round(wall, 2)}, result.stdout


def write_grid(directory: Path, runs: int) -> str:
    """Give the project's config a grid of `runs` seeds in place of its runs, and return its data set."""
    path = directory / "config/config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    dataset = next(iter(config["prepare"]))
    config |= {"runs": {}, "continued": {}}
    config["grids"] = {f"seeds{runs}": {"dataset": dataset, "over": {"train.seed": list(range(runs))}}}
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(dataset)


def make_up(directory: Path, plan: str) -> int:
    """Write the files that a plan's jobs would write, where they are missing; return the number of jobs."""
    jobs = OUTPUT.findall(plan)
    for name in (name for job in jobs for name in job.split(", ")):
        path = directory / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # With a content of its own: DVC makes equal files one, and their times too.
            path.write_text(json.dumps({"files": {}, "made up": name}) + "\n", encoding="utf-8")
    return len(jobs)


def measure(directory: Path, runs: int, dvc: bool) -> dict[str, Any]:
    """Return the figures of a number of runs, with those of `dvc` or without."""
    dataset = write_grid(directory, runs)
    timed([*SNAKEMAKE, "results/config.json", f"results/data/{dataset}/manifest.json"], directory)
    plan, printed = timed([*SNAKEMAKE, "--dry-run", "all"], directory)
    jobs = make_up(directory, printed)
    timed([sys.executable, "-c", MARK, "--cores", "1", "--forceall", "all"], directory, **{IMPORTING: "1"})
    no_op, _ = timed([*SNAKEMAKE, "all"], directory, NOTHING)
    found: dict[str, Any] = {"runs": runs, "jobs": jobs, "snakemake_plan": plan, "snakemake_no_op": no_op}
    if dvc:
        found["dvc_commit"], _ = timed([DVC, "commit", "--force", "--quiet"], directory)
        found["dvc_status"], _ = timed([DVC, "status"], directory, CLEAN)
        found["dvc_repro_no_op"], _ = timed([DVC, "repro"], directory, CLEAN)
    return found


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the exponent of each figure's CPU seconds between the two largest sizes that have it."""
    found = {}
    for name in {name for row in rows for name in row if isinstance(row[name], dict)}:
        sizes = sorted((row["runs"], row[name]["cpu_seconds"]) for row in rows if name in row)[-2:]
        if len(sizes) == 2:
            (few, less), (many, more) = sizes
            found[name] = round(math.log(more / less) / math.log(many / few), 2)
    return found


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--runs", type=int, nargs="+", default=[1000, 100, 10])
    parser.add_argument("--most-dvc", type=int, default=100, help="Ask DVC only up to so many runs.")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for runs in options.runs:
        rows.append(measure(options.project.resolve(), runs, runs <= options.most_dvc))
        print(json.dumps(rows[-1]), flush=True)
        found = {"machine": machine(("snakemake", "dvc", "pydantic")), "sizes": rows, "exponents": exponents(rows)}
        options.output.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
