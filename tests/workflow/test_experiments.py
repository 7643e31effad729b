"""DVC's experiments in a copy of the project, by the dvc of the environment alone, as a user calls it."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BIN, Project, project_environment
from engines import dvc_changed, snakemake_would_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def dvc(project: Project, *arguments: str) -> str:
    """Run .venv/bin/dvc without the environment's folder on PATH."""
    rest = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "snakemake").exists()]
    result = subprocess.run(
        [str(BIN / "dvc"), *arguments],
        cwd=project.directory,
        env=project_environment(project.directory) | {"PATH": os.pathsep.join(rest), "DVC_NO_ANALYTICS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def test_an_experiment_in_a_copy_is_applied(copy_finished: Callable[[str], Project]) -> None:
    """Slow: DVC and Snakemake start for each stage that runs again."""
    project = copy_finished("temp")
    project.commit("finished")
    weights = project.directory / "results/default/adapter/adapter_model.safetensors"
    before = weights.read_bytes()
    dvc(project, "exp", "run", "--temp", "--name", "faster", "-S", "config/config.yaml:train.learning_rate=0.03")
    assert weights.read_bytes() == before, "the copy trained"
    shown = json.loads(dvc(project, "exp", "show", "--json"))
    assert any(each["name"] == "faster" for branch in shown for each in branch["experiments"] or ())
    dvc(project, "exp", "apply", "faster")
    assert weights.read_bytes() != before
    assert dvc_changed(project) == set() and snakemake_would_run(project) == set()
