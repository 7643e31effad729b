"""Two branches of results: changing between them, and merging them, as docs/dvc.md shows it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import Project
from documented import COMMANDS
from engines import dvc_changed, edit_config, snakemake_ran, snakemake_would_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADAPTER = "results/{}/adapter/adapter_model.safetensors"
RECIPE = [
    ["git", "checkout", "--ours", "dvc.lock", "config/runs.yaml"],
    ["zerolora", "expand"],
    ["dvc", "repro"],
]


def adapter(project: Project, run: str = "default") -> bytes:
    return (project.directory / ADAPTER.format(run)).read_bytes()


def change_to(project: Project, branch: str) -> None:
    project.run("git", "checkout", branch)
    project.run("dvc", "checkout", "--force")


@pytest.fixture(scope="module")
def branches(copy_finished: Callable[[str], Project]) -> tuple[Project, dict[str, bytes]]:
    """Return a project with branches `main`, another learning rate, and `more`, two more runs; and their adapters."""
    project = copy_finished("branches")
    project.commit("finished")
    project.run("git", "checkout", "--quiet", "-b", "more")
    edit_config(project, **{"runs.second": {"dataset": "rows", "train": {"learning_rate": 0.03}}})
    snakemake_ran(project)
    project.commit("a second run")
    more = adapter(project), adapter(project, "second")
    change_to(project, "main")
    project.config = yaml.safe_load((project.directory / "config/config.yaml").read_text())
    edit_config(project, **{"train.learning_rate": 0.02})
    edit_config(project, **{"runs.third": {"dataset": "rows", "train": {"learning_rate": 0.04}}})
    snakemake_ran(project)
    project.commit("another rate, and a third run")
    return project, {"more": more[0], "main": adapter(project), "second": more[1], "third": adapter(project, "third")}


def test_a_branch_comes_with_its_results(branches: tuple[Project, dict[str, bytes]]) -> None:
    """Slow: a pipeline of two runs, twice."""
    project, adapters = branches
    for branch in ("more", "main"):
        change_to(project, branch)
        assert adapter(project) == adapters[branch]
        assert dvc_changed(project) == set() and snakemake_would_run(project) == set()


def test_two_branches_are_merged(branches: tuple[Project, dict[str, bytes]]) -> None:
    """Nothing is trained again: each stage is in the run cache of DVC."""
    project, adapters = branches
    merged = project.run("git", "merge", "more", check=False)
    conflicts = project.run("git", "diff", "--name-only", "--diff-filter=U").stdout.split()
    assert merged.returncode != 0 and {"dvc.lock", "config/runs.yaml"} <= set(conflicts), merged.stdout
    runs = project.config["runs"] | {"second": {"dataset": "rows", "train": {"learning_rate": 0.03}}}
    text = yaml.safe_dump(project.config | {"runs": runs}, sort_keys=False)
    (project.directory / "config/config.yaml").write_text(text, encoding="utf-8")
    shown = [command.words for command in COMMANDS if command.page == "docs/dvc.md"]
    printed = ""
    for command in RECIPE:
        assert command in shown
        printed = project.run(*command).stdout
    assert "Running stage 'train" not in printed and "Running stage 'evaluate" not in printed
    assert adapter(project) == adapters["main"]
    assert adapter(project, "second") == adapters["second"] and adapter(project, "third") == adapters["third"]
    project.commit("merged")
    assert "<<<<<<<" not in Path(project.directory / "dvc.lock").read_text()
    assert dvc_changed(project) == set() and snakemake_would_run(project) == set()


def test_the_plan_after_an_edit(branches: tuple[Project, dict[str, bytes]]) -> None:
    """DVC plans `resolve` alone and names Snakemake's plan; after `dvc repro resolve` it plans the next stages."""
    project, _ = branches
    project.config = yaml.safe_load((project.directory / "config/config.yaml").read_text())
    edit_config(project, **{"train.learning_rate": 0.06})
    assert dvc_changed(project) == {"resolve"}
    planned = project.run("dvc", "repro", "--dry").stdout
    assert "# the stages after it: snakemake --dry-run all" in planned and "Running stage 'train" not in planned
    would = snakemake_would_run(project)
    assert {"resolve", "train@default", "merge@default", "report@default"} <= would
    project.run("dvc", "repro", "resolve")
    changed = dvc_changed(project)
    assert "train@default" in changed and not {"resolve", "merge@default", "train@third"} & changed
    project.run("git", "checkout", "--", "dvc.lock", "config")
    project.run("dvc", "checkout", "--force")


def test_stages_that_are_frozen(branches: tuple[Project, dict[str, bytes]]) -> None:
    """DVC freezes no stage of a `foreach`; one stage alone runs instead."""
    project, _ = branches
    refused = project.run("dvc", "freeze", "train@default", check=False)
    assert refused.returncode != 0 and "cannot dump a parametrized stage" in refused.stdout + refused.stderr
    edit_config(project, **{"train.learning_rate": 0.06, "report.examples": 1})
    project.run("dvc", "repro", "resolve")
    printed = project.run("dvc", "repro", "--single-item", "report@default").stdout
    assert "Running stage 'report@default'" in printed and "Running stage 'train" not in printed
    project.run("git", "checkout", "--", "dvc.lock", "config")
    project.run("dvc", "checkout", "--force")
    project.run("dvc", "freeze", "compare")
    assert "frozen: true" in (project.directory / "dvc.yaml").read_text()
    project.run("dvc", "unfreeze", "compare")
    project.run("git", "checkout", "--", "dvc.yaml")


def test_a_clone_with_a_shared_cache_has_the_results(
    branches: tuple[Project, dict[str, bytes]], tmp_path: Path
) -> None:
    project, _ = branches
    clone = Project(tmp_path / "clone")
    project.run("git", "clone", "--quiet", str(project.directory), str(clone.directory))
    clone.run("dvc", "cache", "dir", "--local", str(project.directory / ".dvc/cache"))
    clone.run("dvc", "config", "--local", "cache.shared", "group")
    clone.run("dvc", "checkout", "--force")
    path = ADAPTER.format("default")
    assert (clone.directory / path).samefile(project.directory / path)
    assert dvc_changed(clone) == set() and snakemake_would_run(clone) == set()
