"""The stages reference and teacher in both engines: once for a grid, and again only where their values would change."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow
import pytest
from conftest import Project
from engines import Asker, dvc_changed, edges_of, snakemake_ran, snakemake_would_run

from zerolora.data.reference import records
from zerolora.files import describe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # whole runs of a tiny model in both engines

BETAS = (0.05, 0.5)
TAUGHT = {"objective": "distill", "distill": {"teacher": "tiny", "top_k": 8}}


SHARED = ("reference@dpo", "teacher@taught")


def write_pairs(project: Project) -> None:
    rows = [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": f"{row['output']}0"}
        for row in records("tens", 0)[:20]
    ]
    (project.directory / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    (project.directory / "texts.json").write_text(json.dumps(records("tens", 0)[:20]), encoding="utf-8")


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project that snakemake has finished: DPO with two values of beta, and a run that a teacher teaches,
    which is its own model; none of them is merged or evaluated."""
    project = make_project("dpo")
    write_pairs(project)
    over = {"train.dpo.beta": [*BETAS]}
    taught = {"dataset": "texts", "over": {"train.distill.alpha": [0.5]}, "train": TAUGHT}
    grids = {"dpo": {"dataset": "rows", "over": over}, "taught": taught}
    project.config |= {"runs": {}, "grids": grids, "merge": {"enabled": False}}
    project.config["train"] |= {"objective": "dpo", "learning_rate": 1e-3}
    project.config["evaluate"] |= {"enabled": False}
    texts = {**project.config["prepare"]["rows"], "path": "texts.json"}
    project.config["prepare"] = {"rows": {**texts, "path": "rows.json", "max_length": 160}, "texts": texts}
    project.write_config()
    project.commit("pairs")
    ran = snakemake_ran(project)
    assert {stage for stage in ran if stage.startswith(("reference@", "teacher@"))} == {*SHARED}
    return project


def test_both_runs_compare_with_the_same_reference(project: Project) -> None:
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    edges = edges_of(project)
    assert all("reference@dpo" in edges[f"train@dpo-beta{name}"] for name in ("0_05", "0_5"))
    columns = pyarrow.ipc.open_stream(project.directory / "results/dpo/reference/train.arrow").read_all()
    values = [columns[name].to_numpy() for name in ("reference_chosen", "reference_rejected")]
    assert all(np.isfinite(each).all() and (each < 0).all() for each in values)
    for name in ("0_05", "0_5"):
        metrics = json.loads((project.directory / f"results/dpo-beta{name}/metrics/train.json").read_text())
        # Nothing has changed before the first step.
        assert abs(metrics["chosen_change_first"]) < 1e-3 and abs(metrics["rejected_change_first"]) < 1e-3


def test_a_teacher_that_is_the_model_changes_nothing_at_first(project: Project) -> None:
    """But for the rounding of its probabilities."""
    assert "teacher@taught" in edges_of(project)["train@taught-alpha0_5"]
    results = project.directory / "results/taught-alpha0_5"
    metrics = json.loads((results / "metrics/train.json").read_text())
    assert abs(metrics["kl_first"]) < 1e-6 and metrics["kl_validation"] > -1e-6
    assert metrics["cross_entropy_first"] == pytest.approx(metrics["teacher_cross_entropy_first"], rel=1e-4)
    assert "kl-curve" in (results / "report.html").read_text(encoding="utf-8")


def test_only_what_it_depends_on_makes_it_again(project: Project) -> None:
    before = copy.deepcopy(project.config)
    changes: dict[str, tuple[dict[str, Any], set[str]]] = {
        "train.learning_rate": ({"learning_rate": 2e-3}, set()),
        "train.seed": ({"seed": 7}, set()),
        "train.epochs": ({"epochs": 2}, set()),
        "train.lora.r": ({"lora": {"r": 16}}, set()),
        "train.global_batch": ({"global_batch": 8}, set()),
        "train.method": ({"method": "dora"}, set()),
        "train.precision": ({"precision": "bf16"}, {*SHARED}),
        "quantization": ({"method": "qlora"}, {"reference@dpo"}),
        "train.distill.temperature": ({"distill": {"temperature": 2.0}}, {"teacher@taught"}),
    }
    changes |= {"pack.packing": ({}, set()), "render.strategy": ({}, set())}
    others = {"pack.packing": {"pack": {"packing": True}}, "render.strategy": {"render": {"strategy": "ddp"}}}
    with Asker(project) as engines:
        for name, (train, expected) in changes.items():
            project.config["train"] |= train
            project.config |= others.get(name, {})
            project.write_config()
            planned = engines.snakemake_would_run()
            engines.resolve()
            changed = engines.dvc_changed()
            assert "resolve" in planned and "resolve" in changed, name
            assert {*planned} & {*SHARED} == {*changed} & {*SHARED} == expected, name
            project.config = copy.deepcopy(before)
            project.write_config()
            engines.resolve()  # as it was


def test_damaged_reference_is_one_line(project: Project) -> None:
    """Log-probabilities of another model are refused before the first step."""
    run, folder = "dpo-beta0_5", project.directory / "results/dpo/reference"
    columns = pyarrow.ipc.open_stream(folder / "train.arrow").read_all()
    changed = pyarrow.table({name: columns[name].to_numpy() + 5 for name in columns.column_names})
    with pyarrow.ipc.new_stream(folder / "train.arrow", changed.schema) as writer:
        writer.write_table(changed)
    settings = json.loads((project.directory / f"results/settings/runs/{run}.json").read_text())["runs"][run]["train"]
    command = ("zerolora", "stage", "train", "--settings", json.dumps(settings), "--data", "results/data/rows",
               "--packing", "results/dpo/packing", "--zero", "results/dpo/zero.json", "--weights",
               "resources/weights/tiny.json", "--checkpoints", "work/other", "--output", "work/out",
               "--logs", "work/logs", "--reference", "results/dpo/reference")  # fmt: skip
    refused = project.run(*command, check=False)
    assert refused.returncode and "results/dpo/reference" in refused.stderr  # its hash is another
    named = json.dumps(settings | {"dpo": {**settings["dpo"], "reference": "taught-alpha0_5"}})
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: describe(folder)[name] for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    other = project.run(*command[:4], named, *command[5:], check=False)
    assert other.returncode and "under the base model, and the run compares with taught-alpha0_5; run" in other.stderr
    refused = project.run(*command, check=False)
    lines = [line for line in refused.stderr.splitlines() if "log-probabilities" in line]
    assert refused.returncode and any("than the stage reference: they differ by" in line for line in lines)
    assert "Traceback" not in refused.stderr
