"""The stage reference in both engines: once for a grid, and again only where its log-probabilities would change."""

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


def write_pairs(project: Project) -> None:
    rows = [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": f"{row['output']}0"}
        for row in records("tens", 0)[:20]
    ]
    (project.directory / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project that snakemake has finished: DPO with two values of beta."""
    project = make_project("dpo")
    write_pairs(project)
    over = {"train.dpo.beta": [*BETAS]}
    project.config |= {"runs": {}, "grids": {"dpo": {"dataset": "rows", "over": over}}, "merge": {"version": False}}
    project.config["train"] |= {"objective": "dpo", "learning_rate": 1e-3}
    project.config["prepare"]["rows"] |= {"max_length": 160}
    project.write_config()
    project.commit("pairs")
    ran = snakemake_ran(project)
    assert {stage for stage in ran if stage.startswith("reference@")} == {"reference@dpo"}
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


def test_only_what_it_depends_on_makes_it_again(project: Project) -> None:
    before = copy.deepcopy(project.config)
    changes: dict[str, tuple[dict[str, Any], bool]] = {
        "train.learning_rate": ({"learning_rate": 2e-3}, False),
        "train.seed": ({"seed": 7}, False),
        "train.epochs": ({"epochs": 2}, False),
        "train.lora.r": ({"lora": {"r": 16}}, False),
        "train.global_batch": ({"global_batch": 8}, False),
        "train.method": ({"method": "dora"}, False),
        "train.precision": ({"precision": "bf16"}, True),
        "quantization": ({"method": "qlora"}, True),
    }
    changes |= {"pack.packing": ({}, False), "render.strategy": ({}, False)}
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
            assert ("reference@dpo" in planned, "reference@dpo" in changed) == (expected, expected), name
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
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: describe(folder)[name] for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    refused = project.run(*command, check=False)
    lines = [line for line in refused.stderr.splitlines() if "log-probabilities" in line]
    assert refused.returncode and any("than the stage reference: they differ by" in line for line in lines)
    assert "Traceback" not in refused.stderr
