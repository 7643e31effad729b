"""What the engines cost for many runs: a plan, and a start with nothing to do. benchmarks/scale.py asks for sizes.

Config, model and data go through their stages. What the runs would write is made up: small files that no stage has
computed, which both engines are told to take for results. Each size has a copy of the project to itself, and so pays
for nothing that another has left. CPU seconds are little disturbed by other processes of the machine; wall seconds are.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

BIN = Path(sys.executable).parent
SNAKEMAKE = [str(BIN / "snakemake"), "--profile", "profiles/local"]
DVC = str(BIN / "dvc")
OUTPUT = re.compile(r"^    output: (.+)$", re.MULTILINE)
NOTHING = "Nothing to be done"
IMPORTING = "ZEROLORA_IMPORTING_DVC_STATE"  # tells Snakemake not to ask DVC (workflow/scripts/engine_sync.py)
CLEAN = "Data and pipelines are up to date."
COMMANDS = {
    "snakemake_plan": "snakemake --dry-run all",
    "snakemake_no_op": "snakemake all",
    "dvc_status": "dvc status",
    "dvc_repro_no_op": "dvc repro",
    "dvc_commit": "dvc commit --force",
}
"""What is timed, by the name of its figure."""
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
"""Has Snakemake take all files for those of its jobs; `snakemake --touch` does, but decides again after each job."""


def measure(project: Path, runs: int, dvc: bool) -> dict[str, Any]:
    """Return the jobs and the figures of a grid of so many runs in a copy of `project`, of `dvc` too or not."""
    with copy_of(project) as directory:
        return engines(directory, write_grid(directory, runs), dvc)


def engines(directory: Path, dataset: str, dvc: bool) -> dict[str, Any]:
    """Return the number of jobs, and the CPU and wall seconds of each of COMMANDS, those of `dvc` too or not.

    Config, model and `dataset` go through their stages, what all other jobs would write is made up.
    """
    timed([*SNAKEMAKE, "results/config.json", f"results/data/{dataset}/manifest.json"], directory)
    plan, printed = timed([*SNAKEMAKE, "--dry-run", "all"], directory)
    jobs = make_up(directory, printed, dataset)
    timed([sys.executable, "-c", MARK, "--cores", "1", "--forceall", "all"], directory, **{IMPORTING: "1"})
    no_op, _ = timed([*SNAKEMAKE, "all"], directory, NOTHING)
    result: dict[str, Any] = {"jobs": jobs, "snakemake_plan": plan, "snakemake_no_op": no_op}
    if dvc:
        result["dvc_commit"], _ = timed([DVC, "commit", "--force", "--quiet"], directory)
        result["dvc_status"], _ = timed([DVC, "status"], directory, CLEAN)
        result["dvc_repro_no_op"], _ = timed([DVC, "repro"], directory, CLEAN)
    return result


@contextmanager
def copy_of(project: Path) -> Iterator[Path]:
    """Yield a copy of a project, without its virtual environment, which is removed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder).resolve() / "project"
        shutil.copytree(project, directory, symlinks=True, ignore=shutil.ignore_patterns(".venv"))
        yield directory


def write_grid(directory: Path, runs: int) -> str:
    """Give the project's config a grid of `runs` seeds in place of its runs, and return its data set."""
    path = directory / "config/config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    dataset = next(iter(config["prepare"]))
    config |= {"runs": {}, "continued": {}}
    config["grids"] = {f"seeds{runs}": {"dataset": dataset, "over": {"train.seed": list(range(runs))}}}
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(dataset)


def make_up(directory: Path, plan: str, dataset: str) -> int:
    """Write the files that a plan's jobs would write, where they are missing; return the number of jobs.

    `dataset` is one that is prepared.
    """
    jobs = OUTPUT.findall(plan)
    # Snakemake reads those of each data set, for the memory that an evaluation asks for.
    statistics = json.loads((directory / f"results/data/{dataset}/stats.json").read_text(encoding="utf-8"))
    for name in (name for job in jobs for name in job.split(", ")):
        path = directory / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # With a content of its own: DVC makes equal files one, and their times too.
            content = statistics if fnmatch(name, "results/data/*/stats.json") else {"files": {}}
            path.write_text(json.dumps(content | {"made up": name}) + "\n", encoding="utf-8")
    return len(jobs)


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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/grids.md: the CPU seconds of each command, by the number of runs."""
    rows = sorted(rows, key=lambda row: int(row["size"]))
    lines = ["| command | " + " | ".join(f"{row['size']:,} runs" for row in rows) + " |", f"|---|{'---|' * len(rows)}"]
    for name, command in COMMANDS.items():
        cells = [f"{row[name]['cpu_seconds']:.1f}" if name in row else "" for row in rows]
        lines.append(f"| `{command}` | {' | '.join(cells)} |")
    return "\n".join(lines)
