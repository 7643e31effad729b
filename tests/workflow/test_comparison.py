"""The stage compare, and the table of what is there when a run is refused or fails, in one project."""

import csv
import json
from collections.abc import Callable

import pytest
from conftest import Project
from engines import dvc_changed, edit_config, snakemake_ran, snakemake_would_run

pytestmark = pytest.mark.slow

OF_A_RUN = ("pack", "estimate", "render", "train", "merge", "evaluate", "report", "accept")
REFUSED = {"dataset": "rows", "hardware": {"host_memory": "100MiB"}}
BROKEN = {"dataset": "rows", "train": {"learning_rate": 1e30}}


def table(project: Project, folder: str) -> dict[str, dict[str, str]]:
    with (project.directory / folder / "table.csv").open(newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_refused_and_failed_runs_have_a_row_and_hold_up_no_engine(copy_finished: Callable[[str], Project]) -> None:
    """Takes more than 5 s, since three runs go through both engines."""
    project = copy_finished("compared")
    own = project.directory / "results/compare/table.csv"
    of_default = own.read_text()
    edit_config(project, **{"runs.large": REFUSED, "runs.wild": BROKEN})
    failed = project.snakemake("--keep-going", "all", check=False)
    assert failed.returncode == 1
    assert "work/compare/index.html: 3 runs: 1 done, 1 refused, 1 failed" in failed.stdout + failed.stderr
    rows = table(project, "work/compare")
    assert {name: row["status"] for name, row in rows.items()} == {
        "default": "done",
        "large": "refused",
        "wild": "failed",
    }
    assert rows["large"]["reason"].startswith("render: ") and "of a host's 0.10 GiB" in rows["large"]["reason"]
    assert "lower train.learning_rate" in rows["wild"]["reason"]
    assert float(rows["default"]["loss"]) > 0 and rows["wild"]["loss"] == ""
    assert [rows[name]["hardware.host_memory"] for name in rows] == ["", "100MiB", ""]
    # Only runs that all ended make the stage's own table.
    assert own.read_text() == of_default
    assert "large: refused: render: " in project.run("zerolora", "show").stdout

    # The same by hand, and by DVC, which continues with what it can as well.
    before = (project.directory / "work/compare/table.csv").read_text()
    said = project.run("zerolora", "compare").stdout
    assert said == "work/compare/index.html: 3 runs: 1 done, 1 refused, 1 failed\n"
    assert (project.directory / "work/compare/table.csv").read_text() == before
    assert project.run("dvc", "repro", "--keep-going", check=False).returncode != 0
    assert table(project, "work/compare")["large"] == rows["large"]
    assert own.read_text() == of_default

    # Nothing of it is a reason to run anything again.
    edit_config(project, **{"runs": {"default": {"dataset": "rows"}}})
    assert snakemake_ran(project) == {"resolve"}
    assert own.read_text() == of_default
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    work = project.directory / "work/compare/table.csv"
    work.unlink()
    assert dvc_changed(project) == snakemake_would_run(project) == set()

    # A run that was finished before and is refused now has no results, neither has one that did not get its turn.
    edit_config(project, **{"runs.second": {"dataset": "rows"}})
    assert snakemake_ran(project) == {"resolve", "compare", *(f"{stage}@second" for stage in OF_A_RUN)}
    edit_config(project, **{"hardware.host_memory": "100MiB"})
    project.snakemake("all", check=False)
    rows = table(project, "work/compare")
    assert {row["status"] for row in rows.values()} <= {"refused", "not run"}
    assert "refused" in {row["status"] for row in rows.values()}
    assert "loss" not in rows["default"] or rows["default"]["loss"] == rows["second"]["loss"] == ""
    kept = set(table(project, "results/compare"))
    assert kept == {"default", "second"}  # of the config before; both engines will rewrite it

    edit_config(project, **{"hardware.host_memory": "24GiB"})
    project.snakemake("all")
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    metrics = json.loads((project.directory / "results/compare/metrics.json").read_text())
    assert {name.split(".")[1] for name in metrics} == {"default", "second"}

    # A run that the config no longer has leaves no row: DVC compares the folder of rows.
    edit_config(project, **{"runs": {"default": {"dataset": "rows"}}})
    assert snakemake_ran(project) == {"resolve", "compare"}
    assert [path.name for path in (project.directory / "results/compare/rows").iterdir()] == ["default.json"]
    assert dvc_changed(project) == snakemake_would_run(project) == set()
