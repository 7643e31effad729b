"""The ranks that Snakemake starts: forks of one process, of one thread each, whatever Snakemake sets for the job."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Project, project_environment
from engines import edit_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def rank_of(directory: Path) -> Path | None:
    """Return the entry of /proc of a rank that trains in a project; None if there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().startswith("zl-rank") and (process / "cwd").readlink() == directory:
                return process
        except OSError:
            continue
    return None


def test_ranks_are_forks_of_one_thread(copy_finished: Callable[[str], Project]) -> None:
    """Two ranks of two threads each would spin on two cores, and a thread keeps ranks from being forks.

    Training is started by Snakemake itself; what comes before it is not.
    """
    project = copy_finished("threads")
    edit_config(project, **{"train.ranks_per_node": 2})
    project.snakemake("results/default/zero.json")
    command = ["snakemake", "--profile", "profiles/local", "results/default/adapter/manifest.json"]
    with subprocess.Popen(
        command,
        cwd=project.directory,
        env=project_environment(project.directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        rank = None
        while rank is None and running.poll() is None:
            rank = rank_of(project.directory)
            time.sleep(0.3)  # a look at all processes takes 0.05 s
        variables = (rank / "environ").read_bytes().split(b"\0") if rank else []
        said, _ = running.communicate()
    assert running.returncode == 0, said
    assert {b"OMP_NUM_THREADS=1", b"MKL_NUM_THREADS=1", b"OPENBLAS_NUM_THREADS=1"} <= set(variables)
    # Of the process that it is a fork of; a rank that loads its libraries itself has it no more.
    assert any(each.startswith(b"ZEROLORA_FORK=") for each in variables)
    assert "loads its libraries itself" not in said
