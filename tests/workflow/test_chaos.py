"""Kills, damage and lost records over one finished project: rounds of benchmarks/chaos.py, and what they have shown."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chaos import KINDS, Chaos, Round, send
from conftest import Project
from engines import edit_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 28
# Of the first twenty, six that are unlike one another.
ROUNDS = (0, 1, 3, 4, 7, 8)
# Those that train, or need real processes, take half a minute each: they are measured, not tested.
CHEAP = [kind for kind in KINDS if kind not in ("kill launcher", "kill rank", "full disk")]
ADAPTER = "results/default/adapter"


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    """Return a finished project, and a fresh one, that tests copy."""
    return Chaos(tmp_path_factory.mktemp("chaos"))


@pytest.fixture
def project(chaos: Chaos) -> Iterator[Project]:
    """Return a copy of the finished project."""
    copy = chaos.copy("finished", "copy")
    yield copy
    shutil.rmtree(copy.directory)


def edited(project: Project, edit: str, **values: object) -> Round:
    edit_config(project, **values)
    return Round(project, "snakemake", "finished", edit, random.Random(0))  # noqa: S311 (no secret)


def killed(this: Round, stage: str) -> None:
    """Run until a stage has started, and kill all that works in the project."""
    run = this.begin()
    this.wait_for_stage(run, stage)
    send(this.processes(run)["all"])
    this.wait_for_the_end(run)


@pytest.mark.parametrize("number", ROUNDS)
def test_the_same_command_leads_to_the_same_bytes(chaos: Chaos, number: int) -> None:
    chaos.round(SEED, number, CHEAP, cheap=True)


def test_a_job_whose_shell_was_killed_publishes_nothing_and_runs_again(chaos: Chaos, project: Project) -> None:
    this = edited(project, "train", **{"train.learning_rate": 2e-2})
    run = this.begin()
    this.wait_for_stage(run, "train")
    this.wait_for(run, "rank")
    send(this.processes(run)["shell"])
    this.wait_for_the_end(run)
    assert not (project.directory / ADAPTER / "manifest.json").exists()
    assert chaos.ended(this) == "in the same bytes"


def test_results_without_receipts_are_made_again(chaos: Chaos, project: Project) -> None:
    """DVC has no record of them either. Between two commits of equal runs, it has no metrics to show."""
    project.commit("a run")
    (project.directory / "dvc.lock").unlink()
    shutil.rmtree(project.directory / "results/receipts")
    result = project.snakemake("all")
    assert "no receipt says which job wrote it; it is made again" in result.stderr
    chaos.check_agreement(project)
    project.commit("an equal run")
    compared = ("dvc", "metrics", "diff", "--json", "HEAD~1", "HEAD")
    assert "results/default/summary.json" in json.loads(project.run(*compared, "--all").stdout)
    assert json.loads(project.run(*compared).stdout) == {}


def test_a_lock_file_that_lacks_stages_is_completed(chaos: Chaos, project: Project) -> None:
    """As one of another branch, or one whose end is gone; nothing runs."""
    lock = project.directory / "dvc.lock"
    whole = lock.read_text()
    recorded = yaml.safe_load(whole)
    for stage in ("resolve", "train@default"):
        del recorded["stages"][stage]
    lock.write_text(yaml.safe_dump(recorded))
    assert "Nothing to be done" in project.snakemake("all").stderr
    assert yaml.safe_load(lock.read_text()) == yaml.safe_load(whole)
    chaos.check_agreement(project)


def test_corrupt_config_json_blames_no_other_file(project: Project) -> None:
    path: Path = project.directory / "results/config.json"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
    result = project.snakemake("all", check=False)
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "is not what" in line]
    assert lines == [
        "results/config.json: is not what resolve wrote; `dvc checkout --force results/config.json` restores it"
    ]
