"""DVC's experiments by the dvc of the environment alone, as docs/dvc.md shows them, on a model of a hub."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BIN, ROOT, Project, project_environment
from engines import dvc_changed, edit_config, snakemake_would_run
from loopback_hub import REPOSITORY, REVISION, Hub, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RATE = "config/config.yaml:train.learning_rate"
EXAMPLES = "config/config.yaml:report.examples"
WEIGHTS = "results/default/adapter/adapter_model.safetensors"
BASE = "resources/weights/tiny/model.safetensors"


@pytest.fixture(scope="module")
def hub(tiny_model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    with serving(Hub(files, large=frozenset({"model.safetensors"}))) as hub:
        yield hub


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project], hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return a finished project whose base model is of the hub."""
    os.environ |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_TOKEN": ""}
    project = make_project("experiments")
    pinned = {"repository": REPOSITORY, "revision": REVISION, "license": "MIT"}
    edit_config(project, **{"fetch.directory": {}, "fetch.hub": {"tiny": pinned}})
    project.snakemake("resources/models/tiny/manifest.json")
    weights = ("--model", "resources/models/tiny", "--weights", "resources/weights/tiny")
    project.run("zerolora", "weights", *weights)
    project.snakemake("all")
    project.commit("finished")
    assert "model.safetensors" in hub.downloads()
    hub.asked.clear()
    return project


def dvc(project: Project, *arguments: str, **variables: str) -> str:
    """Run dvc, as a fork."""
    return project.run("dvc", *arguments, **variables).stdout


def real_dvc(project: Project, *arguments: str) -> None:
    """Run .venv/bin/dvc without the environment's folder on PATH."""
    rest = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "snakemake").exists()]
    environment = project_environment(project.directory) | {"PATH": os.pathsep.join(rest), "DVC_NO_ANALYTICS": "1"}
    result = subprocess.run(
        [str(BIN / "dvc"), *arguments],
        cwd=project.directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def settings(project: Project) -> dict[str, tuple[float, int]]:
    """Return the learning rate and the examples of each experiment that has ended, by name."""
    result = {}
    for branch in json.loads(dvc(project, "exp", "show", "--json")):
        for each in branch["experiments"] or ():
            data = each["revs"][0]["data"]["params"]["config/config.yaml"]["data"]
            result[each["name"]] = data["train"]["learning_rate"], data["report"]["examples"]
    return result


def waited(project: Project, pending: tuple[str, ...]) -> str:
    """Return `dvc queue status` once none of its tasks is in one of these states."""
    while any(state in (status := dvc(project, "queue", "status")) for state in pending):
        time.sleep(0.5)
    return status


def test_experiments_run_here_in_a_copy_and_in_a_queue(project: Project, hub: Hub) -> None:
    """Slow: DVC and Snakemake start for each stage that runs again, in three runs. The first has real processes, which
    find the environment's folder themselves; the others train, and their stages are forks."""
    weights, page = project.directory / WEIGHTS, project.directory / "results/default/report.html"
    before, shown = weights.read_bytes(), page.read_bytes()
    real_dvc(project, "exp", "run", "--temp", "--name", "copied", "-S", f"{EXAMPLES}=1")
    dvc(project, "exp", "run", "--queue", "--name", "queued", "-S", f"{RATE}=0.04")
    dvc(project, "queue", "start")
    try:
        status = waited(project, ("Queued", "Running"))
        assert "Success" in status and "Failed" not in status, dvc(project, "queue", "logs", "queued")
        assert "Running stage 'train@default'" in dvc(project, "queue", "logs", "queued")
    finally:
        dvc(project, "queue", "stop")
    waited(project, ("1 active", "1 idle"))
    assert weights.read_bytes() == before, "a copy trained in the project"
    dvc(project, "exp", "run", "--name", "here", "-S", f"{RATE}=0.05")
    here = weights.read_bytes()
    assert here != before
    assert dvc_changed(project) == set() and snakemake_would_run(project) == set()
    assert settings(project) == {"copied": (0.01, 1), "queued": (0.04, 2), "here": (0.05, 2)}
    assert hub.asked == [], "the base model was fetched again"

    dvc(project, "exp", "apply", "queued")
    assert weights.read_bytes() not in (before, here)
    assert dvc_changed(project) == set() and snakemake_would_run(project) == set()
    project.run("git", "checkout", "--quiet", "--", ".")
    dvc(project, "exp", "branch", "copied", "from-the-copy")
    project.run("workflow/scripts/checkout", "from-the-copy")
    assert weights.read_bytes() == before and page.read_bytes() != shown
    assert dvc_changed(project) == set() and snakemake_would_run(project) == set()
    project.run("workflow/scripts/checkout", "main")
    assert weights.read_bytes() == before and page.read_bytes() == shown
    dvc(project, "exp", "remove", "here")
    assert settings(project).keys() == {"copied", "queued"}


def test_the_shown_view_of_experiments_is_one_line_of_metrics_and_changed_settings(project: Project) -> None:
    """As docs/dvc.md shows it."""
    shown = ("exp", "show", "--only-changed", "--drop", r"^(runs|code)\.|^results/")
    assert f"    .venv/bin/dvc {shlex.join(shown)}\n" in (ROOT / "docs/dvc.md").read_text(encoding="utf-8")
    columns = dvc(project, *shown, "--csv")
    header = columns.splitlines()[0].split(",")
    assert "train.learning_rate" in header and len(header) <= 20, header
    assert len(dvc(project, "exp", "show", "--csv").splitlines()[0].split(",")) > 100
    difference = dvc(project, "params", "diff", "copied", "queued", "--targets", "config/config.yaml", "--json")
    assert json.loads(difference)["config/config.yaml"].keys() == {"train.learning_rate", "report.examples"}
    assert "results/default/summary.json" in dvc(project, "metrics", "diff", "copied", "queued")


def test_a_second_clone_shares_the_bytes_of_the_base_model(project: Project, hub: Hub, tmp_path: Path) -> None:
    clone = Project(tmp_path / "clone")
    project.run("git", "clone", "--quiet", str(project.directory), str(clone.directory))
    clone.snakemake("resources/models/tiny/manifest.json", "results/data/rows/manifest.json")
    clone.run("zerolora", "weights", "--model", "resources/models/tiny", "--weights", "resources/weights/tiny")
    assert hub.asked == []
    assert (clone.directory / BASE).samefile(project.directory / BASE)
    assert (clone.directory / BASE).stat().st_mode & 0o222 == 0
