"""Runs with values besides those of config/config.yaml: --config, --configfile, `zerolora run --set`."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Project
from engines import dvc_changed, snakemake_ran, snakemake_would_run

pytestmark = [pytest.mark.slow]  # trains three times

RATE = "train={learning_rate: 3e-4, max_steps: 1}"
ABOUT = "--config train.learning_rate=0.0003 train.max_steps=1"


def read(project: Project, path: str) -> Any:
    return json.loads((project.directory / path).read_text())


def settings(project: Project) -> Any:
    return read(project, "results/settings/runs/default.json")["runs"]["default"]["train"]


def test_a_run_with_other_values_says_so_and_leaves_dvc_alone(copy_finished: Callable[[str], Project]) -> None:
    project = copy_finished("overrides")
    lock = (project.directory / "dvc.lock").read_bytes()
    runs = (project.directory / "config/runs.yaml").read_bytes()
    before = read(project, "results/default/metrics/train.json")
    said = project.snakemake("all", "--config", RATE).stderr
    assert said.count(f"{ABOUT}: DVC records nothing of this run\n") == 1
    assert read(project, "results/default/metrics/train.json")["steps"] == 1
    assert settings(project)["learning_rate"] == 3e-4
    assert read(project, "results/compare/rows/default.json")["reason"].startswith(ABOUT)
    assert ABOUT in (project.directory / "results/default/report.html").read_text()
    assert (project.directory / "dvc.lock").read_bytes() == lock
    assert (project.directory / "config/runs.yaml").read_bytes() == runs
    assert "Nothing to be done" in project.snakemake("all", "--config", RATE).stderr
    assert {"resolve", "train"} <= {name.partition("@")[0] for name in dvc_changed(project)}
    plan = project.snakemake("--dry-run", "all").stderr
    assert "a run restores from DVC's cache: " in plan and snakemake_would_run(project) == set()

    assert snakemake_ran(project) == set()
    after = read(project, "results/default/metrics/train.json")
    assert (after["steps"], after["loss_last"]) == (before["steps"], before["loss_last"])
    assert not read(project, "results/compare/rows/default.json")["reason"].startswith("--config")
    assert ABOUT not in (project.directory / "results/default/report.html").read_text()
    assert dvc_changed(project) == set()


def test_values_keep_their_meaning_and_errors_name_their_source(copy_finished: Callable[[str], Project]) -> None:
    project = copy_finished("sources")

    def line(*arguments: str, **environment: str) -> str:
        command = ("snakemake", "--profile", "profiles/local", "--dry-run", *arguments)
        result = project.run(*command, check=False, **environment)
        assert result.returncode and "Traceback" not in result.stderr
        return result.stderr.strip().splitlines()[-1]

    file = project.directory / "over.yaml"
    file.write_text("train:\n  max_steps: 1\n  lerning_rate: 1\n")
    assert line("--configfile", "over.yaml").startswith("over.yaml:3: train.lerning_rate: there is no such key")
    assert line("--config", "train={max_steps: fast}").startswith("--config: train.max_steps: 'fast' is not valid")
    assert line("--config", "train={a: [}").startswith("--config: train: '{a: [}': ")
    assert line("--config", "train=1", "--config", "render=1").startswith("--config is there twice")
    assert "DVC would record these values" in line("--config", RATE, DVC_STAGE="train@default")
    file.write_text("train:\n  max_steps: 1\n")
    both = project.snakemake("-n", "--configfile", "over.yaml", "--config", "train={learning_rate: 1e-4}").stderr
    about = "--configfile over.yaml --config train.learning_rate=0.0001"
    assert f"{about}: DVC records nothing of this run" in both


def test_set_is_checked_before_snakemake_starts(copy_finished: Callable[[str], Project]) -> None:
    project = copy_finished("set")

    def run(*arguments: str) -> Any:
        return project.run("zerolora", "run", "-n", *arguments, check=False)

    unknown = run("--set", "train.max_stepz=3")
    assert unknown.returncode == 2 and unknown.stderr.startswith(
        "zerolora: --set: train.max_stepz: there is no such key"
    )
    assert "use KEY=VALUE" in run("--set", "train.max_steps").stderr
    missing = run("--configfile", "o.yaml", "--cores", "1")
    assert missing.stderr == "zerolora: --configfile: o.yaml: there is no such file; correct the path\n"
    assert "pass --set train.max_steps=3" in run("--config", "train.max_steps=3").stderr
    assert "exclude each other" in run("--set", "train.max_steps=3", "--config", "train=1").stderr
    assert "--strategy and --config exclude each other" in run("--strategy", "zero3", "--config", "train=1").stderr
    twice = run("--strategy", "zero3", "--set", "render.strategy=zero2").stderr
    assert twice == "zerolora: --strategy and --set render.strategy=zero2 set one key; keep one of them\n"
    absent = run("--strategy", "zero9")
    assert absent.returncode == 2 and len(absent.stderr.splitlines()) == 1
    assert absent.stderr.startswith("zerolora: --strategy: render.strategy: 'zero9'") and "zero3" in absent.stderr
    planned = run("--strategy", "zero3", "--set", "train.max_steps=3", "--", "results/default/adapter/manifest.json")
    assert planned.returncode == 0, planned.stderr
    about = '--config train.max_steps=3 render.strategy="zero3": DVC records nothing of this run'
    assert about in planned.stderr
    project.config["runs"]["default"]["train"] = {"max_steps": 2}
    project.write_config()
    planned = run("--set", "train.max_steps=3", "--", "results/default/adapter/manifest.json")
    assert planned.returncode == 0, planned.stderr
    assert "--config train.max_steps=3: DVC records nothing of this run" in planned.stderr
    assert "train.max_steps=3: run default sets train.max_steps to 2, which it uses" in planned.stderr
