"""Answers what each engine would run, many times in one process, a fork of one that has imported both, in a project's
directory.

Reads a word a line: `snakemake` (a dry run), `dvc` (its status), `settings` (what both compare of each stage) or
`resolve` (does what that stage does). Writes a line of JSON for each. To start the engines for each question takes
three CPU-seconds, to ask here a quarter of one.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def snakemake() -> str:
    """Return what `snakemake --dry-run --verbose all` prints."""
    from snakemake.cli import main

    with tempfile.TemporaryFile() as file, _descriptors(file.fileno()):
        with contextlib.suppress(SystemExit):
            main(["--profile", "profiles/local", "--dry-run", "--verbose", "all"])
        file.seek(0)
        return file.read().decode()


def dvc() -> list[str]:
    """Return the stages that `dvc status` calls changed."""
    from dvc.repo import Repo

    with Repo() as repo:
        return sorted(repo.status())


def resolve() -> None:
    """Do what the stage resolve does."""
    from zerolora import cli

    with contextlib.suppress(SystemExit):
        outputs = ["--output", "results/config.json", "--runs", "results/settings"]
        cli.app(["stage", "resolve", "--config", "config/config.yaml", *outputs], standalone_mode=False)


def settings() -> dict[str, dict[str, str]]:
    """Return the settings and the code of each stage, by which both engines decide."""
    from jobs import Jobs

    from zerolora.config.stages import STAGES

    planned = Jobs(check_files=False).planned({name: [stage.target] for name, stage in STAGES.items()})
    return {name: job.params for name, job in planned.items() if name != "resolve"}


@contextlib.contextmanager
def _descriptors(target: int) -> Any:
    """Send standard output and error, of libraries too, to another file descriptor."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(target, 1)
    os.dup2(target, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)


def main(questions: str, answers: str) -> None:
    """Answer the questions of one named pipe in another, until they end."""
    sys.path[:0] = [str(Path.cwd()), str(Path("workflow/scripts").absolute())]
    answering = {"snakemake": snakemake, "dvc": dvc, "settings": settings, "resolve": resolve}
    with Path(questions).open() as asked, Path(answers).open("w") as answered:
        for line in asked:
            print(json.dumps(answering[line.strip()]()), file=answered, flush=True)
