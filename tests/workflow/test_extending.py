"""Every example of docs/extending.md, added to one copy of the project as the page says, and run there."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Project
from engines import dvc_changed, edit_config, snakemake_would_run
from extending import EXAMPLES, PAGE

from zerolora.strategies import STRATEGIES
from zerolora.train.checkpoint.format import header

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAME, BEFORE = "zero3_whole_adapters", "zero3"
FORM = '| `quiz` | question, answer; hint | `{"question": "What is 1 + 4?", "answer": "5", "hint": "Less than 6."}` |'
FORMAT = "| `human` | `<s>Human: Hi⏎Assistant:« Hello</s>»` | none | no model |"
METHOD = "| `lora_fa` | the second factor of LoRA | estimated only |"
OPTIMIZER = "| `lion_8bit` | `bitsandbytes.optim.Lion` | 1.02 | 0.9, 0.99 | none | everywhere but on NVMe |"
OBJECTIVE = "| `hard_rows` | softplus of a row's loss less the mean row's | rows | lowest `row_loss` |"
TRACKER = "| `jsonl` | yes | `steps.jsonl` | |"
TARGET = "| `bundle` | the adapter | `adapter.zip` | peft |"
# The page with the table of a kind of thing, the line there and the line below it.
LINES = (
    ("data", FORM, "| `text` |"),
    ("data", FORMAT, "| `llama-2` |"),
    ("memory", METHOD, "| `dora` |"),
    ("methods", OPTIMIZER, "| `lion` |"),
    ("training", OBJECTIVE, "\n## The loss"),
    ("telemetry", TRACKER, "| `wandb` |"),
    ("export", TARGET, "| `gguf` |"),
)
# Tests of the registries, which hold for what was added as for the rest.
CHECKS = {
    "test_formats.py": "example_and_stands",
    "test_methods.py": "file_is or estimated or list_every_method",
    "test_prompt_formats.py": "human or table",
    "test_optimizers.py": "((its_states or its_traffic) and lion_8bit) or docs_is_the_registrys",
    "test_tasks.py": "words",
    "test_trackers.py": "jsonl",
    "test_render.py": f"{NAME} or strategies_are_ordered",
    "test_docs.py": "names_of_the_choice",
    "test_dvc_yaml.py": "every_stage",
}


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a copy of the project with every example, which has run with those that a run can have."""
    project = make_project("extended")
    for example in EXAMPLES:
        path = project.directory / "src/zerolora" / example.path
        path.write_text(example.added(path.read_text() if path.exists() else ""))
    for page, line, before in LINES:
        path = project.directory / f"docs/{page}.md"
        path.write_text(path.read_text().replace(before, f"{line}\n{before}", 1))
    row = re.search(rf"^\| `{NAME}` \|.*\n", PAGE, re.M)
    assert row
    path = project.directory / "docs/choice.md"
    path.write_text(re.sub(rf"^\| `{BEFORE}` \|.*\n", rf"\g<0>{row[0]}", path.read_text(), count=1, flags=re.M))
    add_stage(project)
    add_target_settings(project)
    project.run("python", "-m", "zerolora.commands.write_registry_names")
    rows = [{"question": f"{number}?", "answer": f"{number}!", "hint": None} for number in range(20)]
    (project.directory / "rows.json").write_text(json.dumps(rows))
    edit_config(
        project,
        **{
            "prepare.rows.check": "words",
            "prepare.rows.template": "human",
            "render.strategy": NAME,
            "train.objective": "hard_rows",
            "train.optimizer": "lion_8bit",
            "train.tracker": "jsonl",
            "train.ranks_per_node": 2,
            "train.micro_batch": 1,
        },
    )
    project.snakemake("all")
    return project


def add_stage(project: Project) -> None:
    """Add the example of a stage: its module, its rule, its line in the table of stages, its stage in dvc.yaml."""
    text = PAGE.split("\n## A stage\n")[1]
    module, rule = re.findall(r"```python\n(.*?)```", text, re.S)[:2]
    entry, dvc = (re.findall(rf"```{kind}\n(.*?)```", text, re.S)[0] for kind in ("text", "yaml"))
    (project.directory / "src/zerolora/card.py").write_text(module)
    (project.directory / "workflow/rules/card.smk").write_text(rule)
    table = project.directory / "src/zerolora/config/stages.py"
    head, end = table.read_text().split("    )\n}", 1)  # STAGES is the first table
    table.write_text(f"{head}{entry}    )\n}}{end}")
    pipeline = project.directory / "dvc.yaml"
    pipeline.write_text(f"{pipeline.read_text()}\n{dvc}")


def add_target_settings(project: Project) -> None:
    """Add the settings of the example of an export target."""
    text = PAGE.split("\n## An export target\n")[1].split("\n## ")[0]
    section, field = re.search(r"```python\n(class .*?)```", text, re.S), re.search(r"```text\n(.*?)```", text, re.S)
    assert section and field
    path = project.directory / "src/zerolora/config/target_sections.py"
    head, end = path.read_text().split("class ExportSections")
    path.write_text(f"{head}{section[1]}\n\nclass ExportSections{end}{field[1]}")


def read(project: Project, name: str) -> Any:
    return json.loads((project.directory / "results" / name).read_text())


def test_each_is_a_file_or_an_entry_and_a_line_and_a_stage_is_four_files(project: Project) -> None:
    actual = project.run("git", "status", "--porcelain", "--untracked-files=all", "src", "workflow", "docs", "dvc.yaml")
    new = sorted(line[3:] for line in actual.stdout.splitlines() if line.startswith("??"))
    changed = sorted(line[3:] for line in actual.stdout.splitlines() if line.startswith(" M"))
    files = [example for example in EXAMPLES if not example.below]
    assert len(EXAMPLES) == 10 and len(new) == len(files) + 2, new  # the stage's module and rule
    assert changed == [
        "docs/choice.md", "docs/data.md", "docs/export.md", "docs/memory.md", "docs/methods.md", "docs/methods.md",
        "docs/telemetry.md", "docs/training.md", "dvc.yaml", "src/zerolora/config/registry_names.py",
        "src/zerolora/config/stages.py",
        "src/zerolora/config/target_sections.py", "src/zerolora/data/prompt_formats.py",
        "src/zerolora/optimizers/__init__.py", "src/zerolora/strategies/__init__.py",
        "src/zerolora/train/telemetry/trackers.py",
    ]  # fmt: skip


def test_they_pass_the_tests_of_their_registries(project: Project) -> None:
    files = [f"tests/unit/{file}" for file in CHECKS]
    said = project.run("python", "-m", "pytest", "-q", "-rA", *files, "-k", " or ".join(CHECKS.values())).stdout
    passed = re.findall(r"^PASSED tests/unit/(\S+?)::", said, re.M)
    assert set(passed) == set(CHECKS)
    for name in ("quiz", "human", "lora_fa", "words", "jsonl", "lion_8bit", NAME):
        assert re.search(rf"^PASSED .*{name}", said, re.M), name


def test_the_form_prepares_rows(project: Project) -> None:
    project.run("zerolora", "schema", "--output", "work/schema.json")
    assert '"quiz"' in (project.directory / "work/schema.json").read_text()
    assert (
        read(project, "data/rows/stats.json")["read_rows"],
        read(project, "data/rows/stats.json")["train_rows"],
    ) == (20, 12)


def test_the_strategy_is_estimated_rendered_and_trained(project: Project) -> None:
    estimates = read(project, "default/estimate.json")["strategies"]
    names = [each["strategy"] for each in estimates]
    assert len(names) == len(STRATEGIES) + 1
    assert names.index(NAME) == names.index(BEFORE) + 1
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


def test_the_objective_keeps_its_contract(project: Project) -> None:
    file = "tests/train/test_objectives.py"
    said = project.run("python", "-m", "pytest", "-q", "-rA", file, "-k", "hard_rows").stdout
    assert len(re.findall(rf"^PASSED {file}::\S+hard_rows\]", said, re.M)) == 2, said


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


def test_the_method_is_estimated(project: Project) -> None:
    """Trained is the second factor only, and what is saved for the first one's gradient is gone."""
    bytes_of = {}
    for method in ("lora", "lora_fa"):
        options = ("--method", method, "--strategy", "zero2", "--json")
        printed = project.run("zerolora", "memory", "--model", "config/recipes/models/llama-3-8b.json", *options).stdout
        bytes_of[method] = json.loads(printed)["gpu"]
    for term in ("moments", "activations"):
        assert bytes_of["lora_fa"][term] < bytes_of["lora"][term]


def test_the_form_takes_the_columns_that_it_names(project: Project) -> None:
    """Last, since it changes the data."""
    edit_config(project, **{"prepare.rows.format": "quiz", "prepare.rows.columns": {"hint": "hint"}})
    project.snakemake("results/data/rows/manifest.json")
    assert read(project, "data/rows/stats.json")["train_rows"] == 12
