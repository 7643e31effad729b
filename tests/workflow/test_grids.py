"""A grid of runs in both engines: what runs, and that they agree; DVC reads its runs from config/runs.yaml."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from conftest import Project
from engines import dvc_changed, dvc_ran, edges_of, edit_config, snakemake_ran, snakemake_would_run

from zerolora.config.runs_file import DATA_FILES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLANNING = ("estimate", "render")
OF_A_RUN = ("train", "merge", "evaluate", "report", "accept")


def stages_of(*runs: str, stages: tuple[str, ...] = OF_A_RUN) -> set[str]:
    return {f"{stage}@{run}" for stage in stages for run in runs}


def in_file(project: Project) -> dict[str, Any]:
    """Return what config/runs.yaml has of the project's runs."""
    result = yaml.safe_load((project.directory / "config/runs.yaml").read_text(encoding="utf-8"))
    return {group: result[group] for group in ("packed", "estimated", "rendered", "runs")}


def over(project: Project, *ranks: int) -> None:
    project.config["grids"] = {"sweep": {"dataset": "rows", "over": {"train.lora.r": [*ranks]}}}
    write_alone(project)


def write_alone(project: Project) -> None:
    """Write the config and not config/runs.yaml, which is then for the engines to write."""
    text = yaml.safe_dump(project.config, sort_keys=False)
    (project.directory / "config/config.yaml").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project that snakemake has finished: a grid of two runs, and no other."""
    project = make_project("grid")
    before = in_file(project)
    project.config |= {"runs": {}, "merge": {"version": False}}
    over(project, 2, 4)
    assert snakemake_would_run(project) >= stages_of("sweep-r2", "sweep-r4")
    assert in_file(project) == before  # a dry run writes nothing
    shared = {"resolve", "fetch@tiny", "prepare@rows", "evaluate_base@rows", "compare", "pack@sweep"}
    of_runs = stages_of("sweep-r2", "sweep-r4", stages=PLANNING + OF_A_RUN)  # the rank decides what training needs
    assert snakemake_ran(project) == shared | of_runs
    return project


def test_dvc_knows_each_run(project: Project) -> None:
    runs = [f"sweep-r{r}" for r in (2, 4)]
    start: dict[str, Any] = {"dataset": "rows", "start": "results/data/rows/stats.json", "packed": "sweep"}
    start |= {"reference": "results/data/rows/mask.json", "referenced": "", "taught": ""}
    start["tasks"] = [f"results/data/rows/{file}" for file in DATA_FILES]
    assert in_file(project) == {
        "packed": {"sweep": {"dataset": "rows"}},
        "estimated": {run: {"packed": "sweep"} for run in runs},
        "rendered": {run: {"estimated": run} for run in runs},
        "runs": {run: {**start, "estimated": run, "rendered": run} for run in runs},
    }
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    edges = edges_of(project)
    assert all("pack@sweep" in edges[f"train@{run}"] for run in runs)
    sizes = [
        (project.directory / f"results/sweep-r{r}/adapter/adapter_model.safetensors").stat().st_size for r in (2, 4)
    ]
    assert sizes[0] < sizes[1]


def test_resolve_writes_the_runs_of_dvc_which_runs_a_further_value_alone(project: Project) -> None:
    dvc_yaml = (project.directory / "dvc.yaml").read_bytes()
    over(project, 8, 2, 4)
    refused = project.run("dvc", "repro", check=False)
    lines = [line for line in (refused.stdout + refused.stderr).splitlines() if "runs.yaml" in line]
    assert refused.returncode and len(lines) == 1
    assert lines[0].endswith("and is up to date now; run `dvc repro` again")
    assert dvc_ran(project) == {"resolve", "compare"} | stages_of("sweep-r8", stages=PLANNING + OF_A_RUN)
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    assert (project.directory / "dvc.yaml").read_bytes() == dvc_yaml


def test_a_run_that_leaves_the_grid_trains_nothing_again(project: Project) -> None:
    over(project, 4, 8)
    assert snakemake_ran(project) == {"resolve", "compare"}
    assert dvc_changed(project) == set()
    assert (project.directory / "results/sweep-r2/report.html").is_file()
    over(project, 2, 4, 8)
    # Its row, which the comparison has left out, comes back from DVC's cache.
    assert snakemake_ran(project) == {"resolve", "compare"}
    assert dvc_changed(project) == set()
    assert "sweep-r2" in (project.directory / "results/compare/table.md").read_text(encoding="utf-8")


def test_an_edited_file_is_written_again(project: Project) -> None:
    file = project.directory / "config/runs.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("sweep-r2", "sweep-r3"), encoding="utf-8")
    assert "resolve" in dvc_changed(project)
    assert snakemake_ran(project) == set()
    assert file.read_text(encoding="utf-8") == text
    assert dvc_changed(project) == set()


def test_a_run_written_out_is_one_more_call_away_in_dvc(project: Project) -> None:
    project.config["runs"] = {"own": {"dataset": "rows"}}
    write_alone(project)
    assert dvc_changed(project) == {"resolve"}
    refused = project.run("dvc", "repro", "resolve", check=False)
    assert refused.returncode and "run `dvc repro` again" in refused.stdout + refused.stderr
    assert stages_of("own", stages=("pack", *PLANNING, *OF_A_RUN)) <= dvc_changed(project)
    edit_config(project, runs={})
    assert snakemake_ran(project) == set()


def test_a_repeated_run_trains_with_the_next_seed_alone(project: Project) -> None:
    """Two trainings: 10 s."""
    edit_config(project, runs={"own": {"dataset": "rows", "repeats": 2}})
    once = stages_of("own", stages=("pack", *PLANNING))
    assert snakemake_ran(project) == {"resolve", "compare"} | once | stages_of("own", "own-seed43")
    assert dvc_changed(project) == set()
    results = project.directory / "results"
    first, second = (results / f"{run}/adapter/adapter_model.safetensors" for run in ("own", "own-seed43"))
    assert first.read_bytes() != second.read_bytes()
    assert "| `own` | 2 |" in (results / "compare/table.md").read_text(encoding="utf-8")
    said = project.run("zerolora", "compare", "own-seed43", "sweep-r2").stdout
    assert "of 2 seeds and " in said and "of 1 seed: " in said
    edit_config(project, runs={})
    assert snakemake_ran(project) == {"resolve", "compare"}


def test_runs_of_a_grid_go_on_from_a_run_of_another(project: Project) -> None:
    start = {"from_adapter": "results/sweep-r4/adapter", "lora": {"r": 4}}
    edit_config(project, **{"grids.next": {"dataset": "rows", "train": start, "over": {"train.seed": [1, 2]}}})
    # Their seeds are read by training alone, so that what comes before it is made once.
    further = stages_of("next", stages=("pack", *PLANNING)) | stages_of("next-seed1", "next-seed2")
    assert snakemake_would_run(project) == {"resolve", "compare"} | further
    assert dvc_changed(project) == {"resolve"} | further
    assert "train@sweep-r4" in edges_of(project)["train@next-seed1"]


def test_run_is_pushed_with_its_shared_results(project: Project) -> None:
    """Its card and its check read what render wrote, which lies in another folder. Trains for five seconds."""
    project.snakemake("results/config.json", "results/next-seed1/accepted.json")
    push = ("zerolora", "push", "--run", "next-seed1", "--what", "adapter", "--to", "./shared/next")
    project.run(*push)
    assert "| strategy | `zero2` |" in (project.directory / "shared/next/README.md").read_text(encoding="utf-8")
    (project.directory / "results/next/zero.json").write_text("{}", encoding="utf-8")
    refused = project.run(*push, check=False)
    assert refused.returncode and "results/next/zero.json: is not the file that dvc.lock lists" in refused.stderr
