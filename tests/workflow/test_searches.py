"""A search on a tiny model through both engines: trials are runs, it continues where it was, failures do not end it."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Project
from engines import dvc_changed, edit_config, snakemake_would_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SNAKEMAKE = ("snakemake", "--profile", "profiles/local", "all")
SEARCH: dict[str, Any] = {
    "dataset": "rows",
    "train": {"max_steps": 3, "validation_steps": 2},
    "over": {"train.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}, "train.lora.r": [2, 4]},
    "trials": 2,
    "at_once": 2,
}


def trials(project: Project) -> list[dict[str, Any]]:
    text = (project.directory / "config/searches/tune.json").read_text(encoding="utf-8")
    result: list[dict[str, Any]] = json.loads(text)["trials"]
    return result


def metrics(project: Project, run: str) -> dict[str, Any]:
    path = project.directory / f"results/{run}/metrics/train.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> tuple[Project, str]:
    """Return a project whose only runs are the two trials of a search, which Snakemake ran, and what was said."""
    project = make_project("search")
    edit_config(project, runs={}, searches={"tune": SEARCH}, merge={"enabled": False}, evaluate={"enabled": False})
    refused = project.run(*SNAKEMAKE, check=False)
    assert refused.returncode == 2 and "run `zerolora search tune -- COMMAND`" in refused.stderr
    return project, project.run("zerolora", "search", "tune", "--", *SNAKEMAKE).stdout


def test_its_trials_are_runs_of_both_engines(project: tuple[Project, str]) -> None:
    tune, said = project
    assert len(trials(tune)) == 2
    losses = [metrics(tune, f"tune-{number}")["loss_validation"] for number in range(2)]
    best = losses.index(min(losses))
    assert f"{losses[best]:.4f}" in said.splitlines()[1]
    assert f"lowest validation loss is that of tune-{best}" in said
    assert snakemake_would_run(tune) == dvc_changed(tune) == set()


def test_more_trials_go_through_dvc_and_leave_the_first_as_they_are(project: tuple[Project, str]) -> None:
    tune, _ = project
    first = trials(tune)
    edit_config(tune, **{"searches.tune.trials": 3})
    assert snakemake_would_run(tune) == {"resolve"}  # there are no values yet
    said = tune.run("zerolora", "search", "tune", "--", "dvc", "repro").stdout
    assert trials(tune)[:2] == first and len(trials(tune)) == 3
    ran = [line for line in said.splitlines() if line.startswith("Running stage 'train@")]
    assert ran == ["Running stage 'train@tune-2':"]
    assert snakemake_would_run(tune) == dvc_changed(tune) == set()


def test_a_bar_stops_a_trial_which_its_row_says(project: tuple[Project, str]) -> None:
    """A search that was killed left a trial without a result, with a bar that no loss is below."""
    tune, _ = project
    waiting = {"values": trials(tune)[0]["values"], "stop_above": [{"step": 2, "loss": 0.001}]}
    path = tune.directory / "config/searches/tune.json"
    path.write_text(json.dumps({"trials": [*trials(tune), waiting]}), encoding="utf-8")
    said = tune.run("zerolora", "search", "tune", "--", *SNAKEMAKE).stdout
    (row,) = [line for line in said.splitlines() if line.startswith("tune-3 ")]
    assert row.endswith("pruned")
    assert metrics(tune, "tune-3")["steps"] == 2 and metrics(tune, "tune-3")["planned_steps"] == 3
    assert "tune-3: done: stopped early, after 2 of 3 steps" in tune.run("zerolora", "show").stdout
    assert snakemake_would_run(tune) == dvc_changed(tune) == set()


def test_failed_trial_is_skipped_and_the_search_continues(project: tuple[Project, str]) -> None:
    """A trial of more rows in a batch than the data has is refused by training."""
    tune, _ = project
    values = {**trials(tune)[0]["values"], "train.global_batch": 100_000}
    path = tune.directory / "config/searches/tune.json"
    path.write_text(json.dumps({"trials": [*trials(tune), {"values": values}]}), encoding="utf-8")
    done = tune.run("zerolora", "search", "tune", "--", *SNAKEMAKE)
    last = trials(tune)[4]
    assert "global_batch is 100000" in last["failed"]
    assert "tune-4: failed and is skipped from now on" in done.stderr
    assert snakemake_would_run(tune) == dvc_changed(tune) == set()


def test_a_command_that_fails_by_itself_ends_the_search(project: tuple[Project, str]) -> None:
    tune, _ = project
    before = trials(tune)
    for command, expected in (
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with exit code 3, but no trial of tune failed"),
        (["no-such-command"], "No such file or directory; give the command that runs all runs after --"),
    ):
        failed = tune.run("zerolora", "search", "tune", "--", *command, check=False)
        assert failed.returncode == 2 and expected in failed.stderr
    unknown = tune.run("zerolora", "search", "tone", "--", *SNAKEMAKE, check=False)
    assert unknown.returncode == 2 and "has no search 'tone'; use one of tune" in unknown.stderr
    assert trials(tune) == before


def test_without_a_command_it_chooses_one_round(project: tuple[Project, str]) -> None:
    tune, _ = project
    edit_config(tune, **{"searches.tune.trials": 9})
    before = trials(tune)
    first = tune.run("zerolora", "search", "tune").stdout
    again = tune.run("zerolora", "search", "tune").stdout
    assert len(trials(tune)) == len(before) + 2 and first == again
    assert {"train@tune-5", "train@tune-6"} <= dvc_changed(tune) <= snakemake_would_run(tune)
