"""What one engine has done the other calls done, and what each shows of it. Of what may have happened to a project
since: test_receipts.py."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Project, project_environment
from engines import dvc_changed, dvc_ran, edit_config, snakemake_ran, snakemake_would_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def assert_both_clean(project: Project) -> None:
    assert dvc_changed(project) == set()
    written = stamps(project)
    assert snakemake_would_run(project) == set()
    assert stamps(project) == written, "a dry run writes nothing"
    result = project.snakemake("all")
    assert "Nothing to be done" in result.stdout + result.stderr


def stamps(project: Project) -> dict[Path, int]:
    """Return the times of all results, and of what the engines note of them."""
    files = [
        project.directory / "dvc.lock",
        *(project.directory / "results").rglob("*"),
        *project.directory.glob(".snakemake/metadata/*"),
    ]
    return {file: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project that DVC ran, with two commits of results."""
    project = make_project("agreement")
    assert len(dvc_ran(project)) == 13
    assert_both_clean(project)
    project.commit("two examples")
    edit_config(project, **{"report.examples": 1})
    assert snakemake_ran(project) == {"resolve", "report@default"}
    assert_both_clean(project)
    project.commit("one example")
    return project


def adapter(project: Project) -> bytes:
    return (project.directory / "results/default/adapter/adapter_model.safetensors").read_bytes()


def test_a_single_target_is_recorded_with_the_settings(make_project: Callable[[str], Project]) -> None:
    """In a project in which nothing has run, and after an edit that its stages do not read."""
    project = make_project("single")
    target = "results/default/packing/manifest.json"
    stages = {"resolve", "fetch@tiny", "prepare@rows", "pack@default"}
    assert snakemake_ran(project, target) == stages
    assert not dvc_changed(project) & stages
    edit_config(project, **{"report.examples": 1})
    assert snakemake_ran(project, target) == {"resolve"}
    assert not dvc_changed(project) & stages and snakemake_ran(project, target) == set()


def test_weights_are_linked_into_the_cache_not_copied(project: Project) -> None:
    merged = project.directory / "results/default/merged/model.safetensors"
    assert merged.stat().st_nlink > 1 or merged.is_symlink()


def test_base_weights_never_enter_the_cache(project: Project) -> None:
    size = (project.directory / "model/model.safetensors").stat().st_size
    base = (project.directory / "model/model.safetensors").read_bytes()
    cached = [path for path in (project.directory / ".dvc/cache").rglob("*") if path.is_file()]
    assert not [path for path in cached if path.stat().st_size == size and path.read_bytes() == base]


def test_unversioned_merged_weights_stay_out_of_the_cache_and_come_back(project: Project, tmp_path: Path) -> None:
    twin = Project(tmp_path / "twin")
    shutil.copytree(project.directory, twin.directory, symlinks=True)
    twin.config = json.loads(json.dumps(project.config))
    edit_config(twin, **{"merge.version": False})
    snakemake_ran(twin)
    assert_both_clean(twin)
    assert [path.name for path in (twin.directory / "results/default/merged").iterdir()] == ["manifest.json"]
    shutil.rmtree(twin.directory / "work/merged")
    edit_config(twin, **{"evaluate.max_new_tokens": 5})
    assert snakemake_ran(twin) == {"resolve", "evaluate_base@rows", "evaluate@default", "report@default"}
    assert (twin.directory / "work/merged/default/model.safetensors").is_file()


def test_metrics_and_plots_are_dvcs(project: Project) -> None:
    difference = json.loads(project.run("dvc", "metrics", "diff", "--json", "HEAD~1").stdout)
    shown = project.run("dvc", "metrics", "show").stdout
    assert "results/default/summary.json" in shown
    assert isinstance(difference, dict)
    project.run("dvc", "plots", "show", "--out", "plots")
    assert "loss" in (project.directory / "plots/index.html").read_text()
    shutil.rmtree(project.directory / "plots")


def test_snakemakes_own_report_holds_the_page(project: Project) -> None:
    project.snakemake("--report", "snakemake-report.html")
    text = (project.directory / "snakemake-report.html").read_text()
    assert "report.html" in text
    (project.directory / "snakemake-report.html").unlink()


def test_the_page_is_self_contained_and_whole(project: Project) -> None:
    page = (project.directory / "results/default/report.html").read_text()
    for text in (
        "accuracy",
        "zero3_offload",
        "Provenance",
        "<svg",
        "adapter_model.safetensors sha256",
        "lock file sha256",
        "commit",
    ):
        assert text in page
    assert "default-src &#39;none&#39;" in page  # a browser loads nothing for it: tests/browser/test_run_page.py


def test_a_mistake_in_the_config_stops_both_engines_before_anything_runs(project: Project) -> None:
    before = adapter(project)
    rate = project.config["train"]["learning_rate"]
    edit_config(project, **{"train.learning_rate": "fast"})
    for command in (("snakemake", "--profile", "profiles/local", "all"), ("dvc", "repro")):
        result = project.run(*command, check=False)
        assert result.returncode != 0
        assert "train.learning_rate: 'fast' is not valid; use a number, as in 2e-4" in result.stderr + result.stdout
        assert "Traceback" not in result.stderr + result.stdout
    assert adapter(project) == before
    edit_config(project, **{"train.learning_rate": rate})
    project.run("dvc", "checkout")
    assert_both_clean(project)


def test_the_slurm_profile_plans_the_nodes_that_the_config_asks_for(project: Project) -> None:
    config = json.loads(json.dumps(project.config))
    edit_config(
        project,
        **{
            "hardware": {
                "device": "cuda",
                "nodes": 4,
                "gpus_per_node": 8,
                "gpu_memory": "80GiB",
                "compute_capability": 8.0,
            },
            "train.nodes": 2,
            "train.ranks_per_node": 4,
            "train.global_batch": 16,
            "train.epochs": 2,
        },
    )
    result = project.run("snakemake", "--profile", "profiles/slurm", "--dry-run", "--verbose", "all")
    block = result.stdout.partition("rule train:")[2].partition("\n\n")[0]
    for text in ("nodes=2", "tasks=2", "gres=gpu:4", "runtime=5", "launcher=srun"):
        assert text in block, block
    project.config = config
    project.write_config()


def test_the_rule_script_runs_one_rule(project: Project) -> None:
    result = subprocess.run(
        ["sh", "workflow/scripts/rule", "estimate", "results/default/estimate.json"],
        cwd=project.directory,
        env=project_environment(project.directory),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Nothing to be done" in result.stdout + result.stderr


def test_snakemake_lint_is_clean() -> None:
    result = subprocess.run(
        [sys.executable, "tests/lint_workflow.py"],
        cwd=ROOT,
        env=project_environment(ROOT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
