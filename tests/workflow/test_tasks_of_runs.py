"""Further evaluation tasks of runs, in both engines: what each edit runs again, and what it does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project
from engines import (
    Asker,
    dvc_changed,
    edges_of,
    edit_config,
    snakemake_ran,
    snakemake_would_run,
    with_followers,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHECK = "config/tasks/contains.py"
SUMS = {"path": "data/sums", "file": "asked.jsonl", "check": CHECK, "max_new_tokens": 4, "batch": 4}
CAPITALS = {
    "path": "data/capitals.jsonl",
    "check": "multiple_choice",
    "prompt": "The capital of {{country}} is",
    "choices": "cities",
    "answer": "{{right}}",
}


@pytest.fixture(scope="module")
def finished(copy_finished: Callable[[str], Project]) -> Project:
    """Return a project with two tasks on rows and one of the harness, which snakemake has finished."""
    project = copy_finished("tasks")
    folder = project.directory / "data/sums"
    folder.mkdir()
    rows = [{"instruction": f"{n} + 1?", "input": "", "output": str(n + 1)} for n in range(6)]
    for name in ("asked.jsonl", "solved.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project.directory / "data/capitals.jsonl").write_text((ROOT / "config/harness/capitals.jsonl").read_text())
    edit_config(
        project,
        **{
            "tasks.rows": {"sums": SUMS, "capitals-by-rows": CAPITALS},
            "tasks.harness.capitals": {"tasks": ["capitals"]},
        },
    )
    project.snakemake("all")
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    return project


def read(project: Project, name: str) -> Any:
    return json.loads((project.directory / "results" / name).read_text())


def test_base_and_run_have_metrics_and_answers_of_each(finished: Project) -> None:
    for where in ("base/rows", "default"):
        harness = read(finished, f"{where}/tasks/capitals.json")
        ours = read(finished, f"{where}/tasks/capitals-by-rows.json")
        assert (ours["accuracy"], ours["accuracy_norm"]) == (harness["capitals_acc"], harness["capitals_acc_norm"])
        assert (
            len(read(finished, f"{where}/tasks/sums.answers.json"))
            == read(finished, f"{where}/tasks/sums.json")["rows"]
        )
    shown = finished.run("dvc", "metrics", "show", "--json").stdout
    assert "results/default/tasks/sums.json" in shown and "capitals_acc" in shown


def test_a_card_has_both_models_metrics(finished: Project) -> None:
    finished.run("zerolora", "push", "--run", "default", "--what", "adapter", "--to", "./shared/pushed")
    card = (finished.directory / "shared/pushed/README.md").read_text(encoding="utf-8")
    told = card.partition("Further task `capitals-by-rows`")[2].partition("\n\nFurther task")[0]
    base, ours = (read(finished, f"{where}/tasks/capitals-by-rows.json") for where in ("base/rows", "default"))
    change = f"{ours['accuracy'] - base['accuracy']:.4g} ["
    assert f"| {base['accuracy']:.4g} [" in told and f"| {change}" in told
    harness = card.partition("Further task `capitals`")[2]
    assert "| `capitals_acc` |" in harness and "_stderr" not in card and "_rows` |" not in card


ROW = "compare/rows/default.json"
B, R = "task_base@rows-{}", "task@default-{}"


def of(*tasks: str) -> set[str]:
    return {each.format(task) for each in (B, R) for task in tasks}


SETTINGS: list[tuple[str, Any, set[str]]] = [
    *(
        (f"tasks.rows.sums.{key}", value, {"task_rows@sums"})
        for key, value in {
            "path": "data/sums/asked.jsonl", "file": "solved.jsonl", "format": "alpaca",
            "columns": {"input": "instruction"}, "prompt": "{{instruction}}", "few_shot": 1,
            "few_shot_file": "solved.jsonl", "limit": 2,
        }.items()
    ),
    ("tasks.rows.capitals-by-rows.choices", "cities[:3]", {"task_rows@capitals-by-rows"}),
    ("tasks.rows.capitals-by-rows.answer", "{{ right }}", {"task_rows@capitals-by-rows"}),
    ("tasks.rows.sums.seed", 7, {"task_rows@sums", *of("sums")}),
    ("tasks.rows.sums.check", "exact", of("sums")),
    ("tasks.rows.sums.chat_template", True, of("sums")),
    ("tasks.rows.sums.max_new_tokens", 5, of("sums")),
    ("tasks.rows.sums.until", ["\n"], of("sums")),
    ("tasks.rows.sums.batch", 2, of("sums")),
    *(
        (f"tasks.harness.capitals.{key}", value, of("capitals"))
        for key, value in {
            "tasks": ["capitals", "capitals"], "few_shot": 1, "limit": 2, "chat_template": True, "batch": 2, "seed": 1,
            "network": True,
        }.items()
    ),
]  # fmt: skip


def test_each_setting_and_file_changes_the_stages_that_read_it(finished: Project) -> None:
    """Snakemake is checked for the first setting of each set of readers, DVC for all, as in test_rerun_matrix.py."""
    original = json.loads(json.dumps(finished.config))
    edges, wrong = edges_of(finished), {}
    seen: set[frozenset[str]] = set()
    files: list[tuple[Path, set[str]]] = [
        (finished.directory / CHECK, of("sums")),
        (finished.directory / "config/harness/capitals.jsonl", of("capitals")),
    ]
    with Asker(finished) as asker:

        def restore() -> None:
            finished.config = json.loads(json.dumps(original))
            finished.write_config()
            asker.resolve()  # Snakemake refuses settings that its own resolve did not write

        def ask(name: str, readers: set[str], first: bool = True) -> None:
            expected = {"resolve", *readers}
            snakemake = asker.snakemake_would_run() if first else with_followers(edges, expected)
            asker.resolve()
            dvc = asker.dvc_changed()
            if dvc != expected or snakemake != with_followers(edges, expected):
                wrong[name] = {"expected": expected, "dvc": dvc, "snakemake": snakemake}

        for key, value, readers in SETTINGS:
            edits = {key: value}
            if key == "tasks.rows.sums.path":
                edits["tasks.rows.sums.file"] = None
            if key == "tasks.rows.sums.prompt":
                edits["tasks.rows.sums.answer"] = "{{output}}"
            first = frozenset(readers) not in seen
            seen.add(frozenset(readers))
            if first:
                restore()
            finished.config = json.loads(json.dumps(original))
            edit_config(finished, **edits)
            ask(key, readers, first)
        restore()
        for path, readers in files:
            text = path.read_text()
            path.write_text(text + "\n")
            ask(path.name, readers)
            path.write_text(text)
            asker.resolve()
    assert wrong == {}
    assert dvc_changed(finished) == snakemake_would_run(finished) == set()


def test_a_task_that_goes_is_on_no_page_and_in_no_folder_that_dvc_compares(finished: Project) -> None:
    folders = [finished.directory / f"results/{each}/tasks" for each in ("default", "base/rows")]
    edit_config(finished, **{"tasks.rows.again": {**CAPITALS, "limit": 3}})
    shown = {"report@default", "compare"}
    assert snakemake_ran(finished) == {"resolve", "task_rows@again", *of("again"), *shown}
    rows = dict(finished.config["tasks"]["rows"])
    gone = rows.pop("again")
    edit_config(finished, **{"tasks.rows": rows})
    assert snakemake_ran(finished) == {"resolve", *shown}
    assert dvc_changed(finished) == set()
    assert [path for folder in folders for path in folder.glob("again*")] == []
    kept = sorted(path.name for path in (finished.directory / "work/removed_tasks").rglob("*.json"))
    assert kept == ["again.answers.json", "again.answers.json", "again.json", "again.json"]
    page = finished.directory / "results/default/report.html"
    assert "capitals-by-rows" in page.read_text(encoding="utf-8") and "again" not in read(finished, ROW)
    edit_config(finished, **{"tasks.rows.again": gone})
    # Its results come back from DVC's cache.
    assert snakemake_ran(finished) == {"resolve", *shown}
    assert dvc_changed(finished) == set()
    assert "task.again.accuracy" in read(finished, ROW)


def test_the_rows_of_a_task_at_validation_are_an_input_of_training(finished: Project) -> None:
    edit_config(finished, **{"train.validation_tasks": ["capitals-by-rows"]})
    ran = snakemake_ran(finished)
    assert {"resolve", "train@default"} <= ran and not {each for each in ran if each.startswith("task")}
    assert dvc_changed(finished) == set()
    trained = read(finished, "default/metrics/train.json")
    assert trained["capitals-by-rows_validation"] == read(finished, "default/tasks/capitals-by-rows.json")["accuracy"]
