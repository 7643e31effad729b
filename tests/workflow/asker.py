"""Answers what each engine would run, many times in one process, a fork of one that has imported both, in a project's
directory.

Reads a word a line: `snakemake` (a dry run), `dvc` (its status) or `resolve` (does what that stage does). Writes a
line of JSON for each. To start the engines for each question takes three CPU-seconds, to ask here a quarter of one.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def snakemake() -> str:
    """Return what `snakemake --dry-run all` prints."""
    from snakemake.cli import main

    with tempfile.TemporaryFile() as file, _descriptors(file.fileno()):
        with contextlib.suppress(SystemExit):
            main(["--profile", "profiles/local", "--dry-run", "all"])
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
    sys.path.insert(0, str(Path.cwd()))
    with Path(questions).open() as asked, Path(answers).open("w") as answered:
        for line in asked:
            answer = {"snakemake": snakemake, "dvc": dvc, "resolve": resolve}[line.strip()]()
            print(json.dumps(answer), file=answered, flush=True)
