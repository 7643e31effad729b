"""Two rounds of sampling, selecting and training, those of a recipe: one graph for both engines, and what each edit
runs again.

It takes some twenty seconds, the time of three small runs: nothing shorter shows that a round begins with the last.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from conftest import ROOT, Project
from engines import (
    Asker,
    dvc_changed,
    dvc_ran,
    edges_of,
    edit_config,
    snakemake_ran,
    snakemake_would_run,
    with_followers,
)

from zerolora.config.selection_sections import Selection
from zerolora.data.prepared_rows import open_table

CHECK = "config/tasks/even.py"
TASK = """
from zerolora.evaluate.tasks.task import Judgement, Row, Task, TaskExample


def judge(row: Row, answer: str) -> Judgement:
    return Judgement(format=True, right=len(answer) % 2 == 0, scores={"length": float(len(answer))})


TASK = Task(name="even", rule="its length is even", judge=judge, example=TaskExample("a?", "b", "bb", "b"))
"""
RECIPE = "config/recipes/llama-3.1-8b-rounds-8x80gb/config.yaml"
TINY: dict[str, Any] = {
    "of": "default",
    # The model is random: one of these letters ends an answer of it soon, and few answers are whole texts.
    "samples.n": 40, "samples.stop": [*"aeiorstn "], "samples.max_new_tokens": 24, "samples.ranks": 1,
    "selections.check": CHECK, "train.global_batch": 2, "train.max_steps": 1, "train.dpo.reference": "default",
}  # fmt: skip
"""What the recipe's rounds have otherwise here."""
ONE, TWO = "own-round1", "own-round2"
BOTH = {f"select@{ONE}", f"select@{TWO}"}


@pytest.fixture(scope="module")
def finished(make_project: Callable[[str], Project]) -> Project:
    """Return a project whose rounds snakemake has finished and DVC has recorded."""
    project = make_project("rounds")
    (project.directory / CHECK).write_text(TASK)
    rounds = yaml.safe_load((ROOT / RECIPE).read_text(encoding="utf-8"))["rounds"]
    edit_config(project, rounds=rounds, **{f"rounds.own.{key}": value for key, value in TINY.items()})
    assert rounds["own"]["rounds"] == 2
    ran = snakemake_ran(project)
    of_round = {
        f"{stage}@{name}" for stage in ("sample", "select", "prepare", "reference", "train") for name in (ONE, TWO)
    }
    assert of_round <= ran
    assert dvc_changed(project) == snakemake_would_run(project) == set()
    return project


def _lines(project: Project, path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.directory / "results" / path).read_text().splitlines()]


def test_a_round_samples_and_continues_the_last_one(finished: Project) -> None:
    results = finished.directory / "results"
    (first, *_), (second, *_) = (_lines(finished, f"selections/{name}/rows.jsonl") for name in (ONE, TWO))
    models = [row["zerolora_sample"]["model"]["adapter_tensors"] for row in (first, second)]
    manifests = [json.loads((results / f"{run}/adapter/manifest.json").read_text()) for run in ("default", ONE, TWO)]
    hashes = [each["files"]["adapter_model.safetensors"]["sha256"] for each in manifests]
    assert models == hashes[:2]
    assert len({*hashes}) == 3
    # Both compare with the first run, and the second starts from the first round.
    for name in (ONE, TWO):
        settings = json.loads((results / f"{name}/reference/manifest.json").read_text())["settings"]
        assert settings["from_adapter"] == "results/default/adapter"


def test_held_out_rows_are_those_of_the_first_data_set(finished: Project) -> None:
    data = finished.directory / "results/data"
    rows = open_table(data / "rows", "test").drop_columns(["source"])
    for name in (ONE, TWO):
        assert open_table(data / name, "test").drop_columns(["source"]).equals(rows)
        assert len(open_table(data / name, "validation")) == 0  # texts, and no pairs
    asked = {*open_table(data / "rows", "test")["question"].to_pylist()}
    assert asked.isdisjoint(row["prompt"][0]["content"] for row in _lines(finished, f"selections/{ONE}/rows.jsonl"))


def test_a_round_is_rebuilt_with_what_it_is_made_of(finished: Project) -> None:
    """At a revision, with results from DVC's cache, while the rows and a setting are others now. (It makes the first
    run again, its answers and the rows selected from them.)"""
    finished.commit("finished")
    rows, learning_rate = (finished.directory / "rows.json").read_text(), finished.config["train"]["learning_rate"]
    (finished.directory / "rows.json").write_text("[]")
    edit_config(finished, **{"train.learning_rate": 1.0})
    result = finished.run("zerolora", "rebuild", f"{ONE}@HEAD", "--output", "work/rebuilt", check=False)
    (finished.directory / "rows.json").write_text(rows)
    edit_config(finished, **{"train.learning_rate": learning_rate})
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "equal to the byte"
    found = json.loads((finished.directory / "work/rebuilt/rebuild.json").read_text())["products"]
    stages = {f"{stage}@{ONE}" for stage in ("sample", "select", "prepare", "reference", "train", "evaluate")}
    assert {"train@default", *stages} <= {each["stage"] for each in found if each["equal"]}


EDITS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "selections.most": ({}, BOTH),
    "selections.mixed": ({}, BOTH),
    "selections.score": ({}, BOTH),
    "selections.margin": ({"selections.score": "length"}, BOTH),
    "selections.least": ({"selections.score": "length"}, BOTH),
    "selections.max_answer_length": ({}, BOTH),
    "selections.check": ({}, BOTH),
    "selections.check_settings": ({"selections.check": "regex", "selections.score": None}, BOTH),
    "samples.seed": ({}, {f"sample@{ONE}", f"sample@{TWO}"}),
    "prepare.seed": ({}, {f"prepare@{ONE}", f"prepare@{TWO}"}),
    "train.dpo.reference": (
        {},
        {f"reference@{TWO}", *(f"{stage}@{name}" for stage in ("train", "report") for name in (ONE, TWO)), "compare"},
    ),
}
VALUES: dict[str, Any] = {
    "selections.most": 1, "selections.mixed": True, "selections.score": "length", "selections.margin": 1.0,
    "selections.least": 2.0, "selections.max_answer_length": 20, "selections.check": "exact",
    "selections.check_settings": {"pattern": "a"}, "samples.seed": 1, "prepare.seed": 2, "train.dpo.reference": "start",
}  # fmt: skip
ELSEWHERE = {"samples", "keep"}  # which need another sample, or another objective


def test_each_edit_changes_the_stages_that_read_it(finished: Project) -> None:
    assert {f"selections.{key}" for key in Selection.model_fields.keys() - ELSEWHERE} <= EDITS.keys()
    original, wrong = json.loads(json.dumps(finished.config)), {}
    edges = edges_of(finished)
    with Asker(finished) as asker:
        before = asker.settings()
        for key, (beside, readers) in EDITS.items():
            finished.config = json.loads(json.dumps(original))
            edit_config(
                finished, **{f"rounds.own.{name}": value for name, value in {**beside, key: VALUES[key]}.items()}
            )
            changed = {name for name, texts in asker.settings().items() if texts != before[name]}
            actual = {"settings": changed}
            if key in ("selections.most", "train.dpo.reference"):
                snakemake = asker.snakemake_would_run()
                asker.resolve()
                actual["dvc"] = asker.dvc_changed() - {"resolve"}
                if snakemake != with_followers(edges, {"resolve", *readers}):
                    actual["snakemake"] = snakemake
            if any(stages != readers for stages in actual.values()):
                wrong[key] = {"expected": readers} | actual
            finished.config = json.loads(json.dumps(original))
            finished.write_config()
            if len(actual) > 1:
                asker.resolve()  # Snakemake refuses settings that its own resolve did not write
    assert wrong == {}


def test_select_runs_again_without_the_sample(finished: Project) -> None:
    """With the same rows nothing after it runs: here a limit that no answer reaches. Nor does it with the same answers,
    of which none is made again: here in other batches."""
    edit_config(finished, **{"rounds.own.selections.max_answer_length": 1000, "rounds.own.samples.batch": 7})
    assert dvc_ran(finished) == {"resolve", f"sample@{ONE}", f"sample@{TWO}", *BOTH}
    assert json.loads((finished.directory / f"results/samples/{TWO}/sample.json").read_text())["new_answers"] == 0
    assert snakemake_would_run(finished) == set()
    edit_config(finished, **{"rounds.own.samples.n": 41})
    assert f"sample@{ONE}" in snakemake_would_run(finished) and "train@default" not in snakemake_would_run(finished)


def test_a_new_task_selects_again_and_its_prompt_becomes_no_row(finished: Project) -> None:
    edit_config(finished, **{"rounds.own.samples.n": 40})
    rows = f"selections/{ONE}/rows.jsonl"
    (question, *_), others = (each["content"] for each in _lines(finished, rows)[0]["prompt"]), _lines(finished, rows)
    (finished.directory / "asked.json").write_text(json.dumps([{"instruction": question.upper(), "output": "1"}]))
    edit_config(finished, **{"tasks": {"rows": {"same": {"path": "asked.json"}}}})
    again = {"resolve", "task_rows@same", "held_out@task-same", f"select@{ONE}"}
    assert snakemake_ran(finished, f"results/selections/{ONE}/manifest.json") == again
    assert _lines(finished, rows) == [row for row in others if row["prompt"][0]["content"] != question]
    changed = dvc_changed(finished)
    assert f"prepare@{ONE}" in changed and not changed & {*again, f"sample@{ONE}"}
