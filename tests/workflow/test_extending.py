"""A package with an entry for each registry, and a stage, added to one copy of the project and run there."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import made_up
import pytest
import yaml
from conftest import ROOT, Project
from engines import dvc_changed, edit_config, snakemake_would_run

from zerolora.strategies import STRATEGIES
from zerolora.train.checkpoint.format import header

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "zero3_whole_adapters"
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a copy of the project with the package and the stage, which has run with all that a run can have."""
    project = make_project("extended")
    made_up.install(project.directory / "src")  # which is on PYTHONPATH
    add_stage(project)
    rows = [{"question": f"{number}?", "answer": f"{number}!", "hint": None} for number in range(20)]
    (project.directory / "rows.json").write_text(json.dumps(rows))
    edit_config(
        project,
        **{
            "prepare.rows.check": "words",
            "prepare.rows.format": "quiz",
            "prepare.rows.columns": {"hint": "hint"},
            "render.strategy": NAME,
            "train.method": "narrow",
            "train.narrow": {"r": 2},
            "train.objective": "hard_rows",
            "train.hard_rows": {"sharpness": 2.0},
            "train.optimizer": "lion_8bit",
            "train.tracker": "jsonl",
            "train.ranks_per_node": 2,
            "train.micro_batch": 1,
        },
    )
    project.snakemake("all")
    return project


def add_stage(project: Project) -> None:
    """Add the example of a stage: its module, and its entry in the table of stages."""
    text = PAGE.split("\n## A stage\n")[1]
    (module, *_), (entry, *_) = (re.findall(rf"```{kind}\n(.*?)```", text, re.S) for kind in ("python", "text"))
    (project.directory / "src/zerolora/card.py").write_text(module)
    table = project.directory / "src/zerolora/config/stages.py"
    head, end = table.read_text().split("    )\n}", 1)  # STAGES is the first table
    table.write_text(f"{head}{entry}    )\n}}{end}")
    project.run("python", "-m", "zerolora.config.dvc_file")


def read(project: Project, name: str) -> Any:
    return json.loads((project.directory / "results" / name).read_text())


CHANGED = ("src/zerolora", "workflow", "dvc.yaml")


def test_only_the_stage_changes_the_project(project: Project) -> None:
    actual = project.run(
        "git", "status", "--porcelain", "--untracked-files=all", "src/zerolora", "workflow", "dvc.yaml"
    )
    lines = {line.strip() for line in actual.stdout.splitlines()}
    assert lines == {"?? src/zerolora/card.py", "M src/zerolora/config/stages.py", "M dvc.yaml"}


def test_the_form_prepares_rows(project: Project) -> None:
    project.run("zerolora", "schema", "--output", "work/schema.json")
    assert '"quiz"' in (project.directory / "work/schema.json").read_text()
    stats = read(project, "data/rows/stats.json")
    assert (stats["read_rows"], stats["train_rows"]) == (20, 12)


def test_the_method_is_trained_and_merged(project: Project) -> None:
    config = read(project, "default/adapter/adapter_config.json")
    assert config["r"] == 2 and {*config["target_modules"]} == {"q_proj", "v_proj"}
    assert (project.directory / "results/default/merged/manifest.json").exists()


def test_the_strategy_is_estimated_rendered_and_trained(project: Project) -> None:
    estimates = read(project, "default/estimate.json")["strategies"]
    names = [each["strategy"] for each in estimates]
    assert names == [*STRATEGIES, NAME]
    assert estimates[names.index(NAME)]["fits"]
    zero = read(project, "default/zero.json")
    assert zero["zerolora"]["strategy"] == NAME
    assert zero["zero_optimization"]["stage3_param_persistence_threshold"] == 64 * 32  # the tiny model's width
    assert read(project, "default/metrics/train.json")["steps"] == 2


def test_the_optimizer_is_estimated_and_its_state_saved(project: Project) -> None:
    (newest, *_) = sorted((project.directory / "work/checkpoints/default").glob("*/*.safetensors"), reverse=True)
    manifest = header(newest)
    assert manifest["resume_key"]["train.optimizer"] == "lion_8bit"
    assert {name.split("/")[0] for name in manifest["tensors"]} >= {"weight", "exp_avg"}
    asked = ["memory", "--model", "model", "--strategy", "zero0", "--lora-r", "4", "--json", "--optimizer"]
    actual = [
        json.loads(project.run("zerolora", *asked, name).stdout)["gpu"]["moments"] for name in ("lion", "lion_8bit")
    ]
    assert actual[0] == pytest.approx(4 / (1 + 4 / 256) * actual[1], rel=0.01)


def test_the_objective_is_estimated_trained_and_reported(project: Project) -> None:
    """Its loss and metric are of rows; its forward pass before the step costs time, its fp64 losses cost memory."""
    trained = read(project, "default/metrics/train.json")
    assert trained["loss_first"] >= math.log(2)  # softplus is convex
    assert trained["row_loss_validation"] > trained["loss_validation"]
    lines = (project.directory / "results/default/metrics/telemetry.csv").read_text().splitlines()
    assert len(lines) == 1 + trained["steps"] and "row_loss" in lines[0].split(",")
    assert "loss per row" in (project.directory / "results/default/report.html").read_text()
    memory = ["memory", "--model", "model", "--strategy", "ddp", "--loss", "fused", "--json", "--objective"]
    totals = [
        json.loads(project.run("zerolora", *memory, name).stdout)["phases"]["loss"] for name in ("sft", "hard_rows")
    ]
    assert totals[1] - totals[0] == pytest.approx(8 * 4096, rel=0.05)  # and a share of it for fragmentation
    steps, flops = {}, {}
    for objective in ("hard_rows", "sft"):
        edit_config(project, **{"train.objective": objective})
        if objective == "sft":
            rerun = {f"{stage}@default" for stage in ("estimate", "render", "train", "report")}
            assert snakemake_would_run(project) >= rerun
        project.snakemake("results/default/render.json")
        steps[objective] = read(project, "default/render.json")["choice"]["ranked"][0]["step_seconds"]
        flops[objective] = read(project, "default/zero.json")["zerolora"]["flops"]["supervised_token"]
    edit_config(project, **{"train.objective": "hard_rows"})
    project.snakemake("results/default/render.json")
    assert flops["hard_rows"] == 1.5 * flops["sft"]  # two passes forward, and the gradient of a frozen head's input
    assert steps["hard_rows"] > steps["sft"]


def test_the_tracker_gets_every_step(project: Project) -> None:
    lines = (project.directory / "work/tracking/default/jsonl/steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "loss" in json.loads(lines[0])


def test_the_task_judges_answers(project: Project) -> None:
    answers = read(project, "base/rows/answers.json")
    assert read(project, "base/rows/evaluate.json")["word_share"] == sum(
        answer["word_share"] for answer in answers
    ) / len(answers)


def test_the_stage_runs_in_both_engines(project: Project) -> None:
    card = (project.directory / "results/default/card.md").read_text()
    assert card.splitlines() == [
        f"- {name}: {value}" for name, value in sorted(read(project, "default/summary.json").items())
    ]
    assert dvc_changed(project) == set()
    assert snakemake_would_run(project) == set()


def test_the_export_target_is_made_by_request_alone(project: Project) -> None:
    """render tries targets, and what it then writes for training is the same."""
    edit_config(project, **{"export.targets": ["bundle", "vllm_adapter"]})
    trained = (project.directory / "results/default/adapter/manifest.json").stat().st_mtime_ns
    assert {"resolve", "render@default"} <= snakemake_would_run(project)
    project.snakemake("export")
    assert (project.directory / "results/default/adapter/manifest.json").stat().st_mtime_ns == trained
    for target in ("bundle", "vllm_adapter"):
        loaded = read(project, f"default/export/{target}/manifest.json")["loaded"]
        assert loaded["opened_by"].startswith("peft")
        assert loaded["equal"] == 3, loaded
    project.snakemake("all")
    assert (project.directory / "results/default/adapter/manifest.json").stat().st_mtime_ns == trained
    assert dvc_changed(project) == snakemake_would_run(project) == set()


def test_the_importer_translates_its_file(project: Project) -> None:
    (project.directory / "notes.yaml").write_text("base: model\nrows_file: rows.json\nrate: 0.002\n")
    project.run("zerolora", "import", "notes.yaml", "--output", "work/imported.yaml")
    imported = yaml.safe_load((project.directory / "work/imported.yaml").read_text())
    assert imported["fetch"]["directory"]["model"]["path"] == "model"
    assert imported["prepare"]["rows"] | {"split": {}} == {"model": "model", "path": "rows.json", "split": {}}
    assert imported["train"]["learning_rate"] == 0.002


def test_an_edit_of_the_package_runs_what_chooses_its_entries(project: Project) -> None:
    """Each stage whose entries are in the package; merge and export use the method's code."""
    path = project.directory / "src/made_up/quiz.py"
    path.write_text(path.read_text() + "\n# A remark.\n")
    assert snakemake_would_run(project) <= {"resolve"}
    path.write_text(path.read_text() + "\nNUMBER = 1\n")
    changed = snakemake_would_run(project)
    assert {"prepare@rows", "estimate@default", "render@default", "train@default", "merge@default"} <= changed
    assert not {"fetch@tiny"} & changed
