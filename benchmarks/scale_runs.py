"""What many runs cost the two engines: a plan, and a start with nothing to do.

    python3 benchmarks/scale_runs.py --project DIR --runs 10 100 1000

DIR is a copy of the project with any data set; its config gets a grid of seeds on the first one in place of its runs.
Config, model and data go through their stages. What the runs would write is made up: small files that no stage has
computed, which both engines are told to take for results. Writes CPU and wall seconds to
benchmarks/results/scale_runs.json, with the exponent of the cost in the runs, between the last two sizes.
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
CLEAN = "Data and pipelines are up to date."


def timed(command: list[str], directory: Path, expected: str = "") -> tuple[dict[str, float], str]:
    """Return the CPU and wall seconds of a command and its children, and what it printed, `expected` among it."""
    environment = os.environ | {"PYTHONPATH": str(directory / "src"), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
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


def measure(directory: Path, runs: int) -> dict[str, Any]:
    """Return the figures of a number of runs."""
    dataset = write_grid(directory, runs)
    timed([*SNAKEMAKE, "results/config.json", f"results/data/{dataset}/manifest.json"], directory)
    plan, printed = timed([*SNAKEMAKE, "--dry-run", "all"], directory)
    jobs = make_up(directory, printed)
    commit, _ = timed([DVC, "commit", "--force", "--quiet"], directory)
    take_over, _ = timed([*SNAKEMAKE, "all"], directory, NOTHING)
    no_op, _ = timed([*SNAKEMAKE, "all"], directory, NOTHING)
    status, _ = timed([DVC, "status"], directory, CLEAN)
    repro, _ = timed([DVC, "repro"], directory, CLEAN)
    return {
        "runs": runs,
        "jobs_planned": jobs,
        "snakemake_plan": plan,
        "snakemake_takes_over_from_dvc": take_over,
        "snakemake_no_op": no_op,
        "dvc_commit": commit,
        "dvc_status": status,
        "dvc_repro_no_op": repro,
    }


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the exponents of the CPU seconds between the last two sizes."""
    one, other = rows[-2:]
    growth = math.log(other["runs"] / one["runs"])
    return {
        name: round(math.log(value["cpu_seconds"] / one[name]["cpu_seconds"]) / growth, 2)
        for name, value in other.items()
        if isinstance(value, dict)
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for runs in options.runs:
        rows.append(measure(options.project.resolve(), runs))
        print(json.dumps(rows[-1]), flush=True)
    found = {"machine": machine(("snakemake", "dvc", "pydantic")), "sizes": rows}
    if len(rows) > 1:
        found["exponents"] = exponents(rows)
    options.output.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
