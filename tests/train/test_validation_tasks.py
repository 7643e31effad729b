"""Tasks at validation: the answers of the evaluation, on every engine, also after a resume."""

import csv
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, metrics, rank_process
from conftest import ROOT

from zerolora.config.settings import AskedTaskSettings, TaskRowsSettings
from zerolora.data.reference import records
from zerolora.data.task_rows import task_rows
from zerolora.evaluate.asked_task import ask
from zerolora.evaluate.evaluated_models import EvaluatedModel
from zerolora.model.manifest import located
from zerolora.train.launch.stop_signals import STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each test trains

TRAINED: dict[str, Any] = {
    "max_steps": 4,
    "epochs": 4,
    "schedule": "constant",
    "learning_rate": 0.03,
    "seed": 1,
    "validation_steps": 2,
    "keep": "last",
    "validation_tasks": ["capitals", "sums", "written"],
}
ROWS = 12
"""Of the task of sums; each is answered by each engine, which is most of what these tests cost."""
FILES = ("adapter/adapter_model.safetensors", "metrics/train.json", "metrics/loss.csv")


@pytest.fixture(scope="module")
def with_tasks(bench: Bench) -> Iterator[Bench]:
    """Return the bench with a task of plain prompts and one of the chat template, whose right choices are trained."""
    texts = records("tens", 0)[:ROWS]
    sums = [
        {"question": row["instruction"], "answers": [texts[(n + k) % ROWS]["output"] for k in range(4)], "right": 0}
        for n, row in enumerate(texts)
    ]
    capitals = (ROOT / "config/harness/capitals.jsonl").read_text().splitlines(keepends=True)[: ROWS // 2]
    (bench.folder / "capitals.rows.jsonl").write_text("".join(capitals))
    (bench.folder / "sums.rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    common = {"check": "multiple_choice", "answer": "{{right}}"}
    bench.tasks = {
        "capitals": {**common, "prompt": "The capital of {{country}} is", "choices": "cities", "few_shot": 1},
        "sums": {**common, "prompt": "{{question}}", "choices": "answers", "chat_template": True},
        # What the tiny model writes is no language: right is an answer with certain letters, so that most answers that
        # differ are judged differently.
        "written": {
            "check": "regex",
            "check_settings": {"pattern": "丫"},
            "prompt": "{{question}}",
            "answer": "{{answers[0]}}",
            "chat_template": True,
            "max_new_tokens": 12,
            "until": ["1"],
        },
    }
    (bench.folder / "tasks").mkdir()
    for name, task in bench.tasks.items():
        task["path"] = str(bench.folder / f"{'sums' if name == 'written' else name}.rows.jsonl")
        of_rows = {key: value for key, value in task.items() if key in TaskRowsSettings.model_fields}
        task_rows(TaskRowsSettings(**of_rows, whole=False), bench.folder / f"tasks/{name}.jsonl")
    yield bench
    bench.tasks = {}


@pytest.fixture(scope="module")
def trained(with_tasks: Bench) -> Path:
    return with_tasks.run("with-tasks", "zero2", **TRAINED)


def accuracies(run: Path, tasks: Sequence[str] = tuple(TRAINED["validation_tasks"])) -> dict[str, list[float]]:
    with (run / "metrics/loss.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss_validation"]]
    return {name: [float(row[f"{name}_validation"]) for row in rows] for name in tasks}


def test_accuracy_is_that_of_the_evaluation(with_tasks: Bench, trained: Path) -> None:
    seen = accuracies(trained)
    assert [len(values) for values in seen.values()] == [2, 2, 2]
    assert 0 < seen["written"][-1] < 1, "all answers are judged alike, so this test would prove nothing"
    assert len(set(seen["sums"])) == 2, "training changed no answer, so this test would prove nothing"
    for name in with_tasks.tasks:
        assert seen[name][-1] == metrics(trained)[f"{name}_validation"] == evaluated(with_tasks, trained, name)


def evaluated(bench: Bench, run: Path, name: str, data: str = "data") -> float:
    """Return the accuracy of a run's adapter in the stage task."""
    own = {key: value for key, value in bench.tasks[name].items() if key in AskedTaskSettings.model_fields}
    defaults: dict[str, Any] = {"check_settings": {}, "check_source": None, "max_new_tokens": 1, "chat_template": False}
    settings = AskedTaskSettings(**defaults | own, batch=3, seed=1)
    model = EvaluatedModel(located(bench.folder / "w/tiny.json"), run / "adapter")
    rows, output, answers = bench.folder / f"tasks/{name}.jsonl", run / f"{name}.json", run / f"{name}.answers.json"
    ask(settings, rows, model, bench.folder / data, output, answers)
    return float(json.loads(output.read_text())["accuracy"])


def test_tasks_are_evaluated_beside_a_preference_objective(with_tasks: Bench) -> None:
    with_tasks.prefer()
    of_pairs = {"data": "pairs", "packing": "pairs-packed", "reference": "pairs-reference", "objective": "dpo"}
    settings = TRAINED | {"validation_tasks": ["sums"]}
    run = with_tasks.run("with-tasks-dpo", "zero2", **settings, **of_pairs)
    (values,) = accuracies(run, ["sums"]).values()
    assert values[-1] == evaluated(with_tasks, run, "sums", "pairs")


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("zero3", {"micro_batch": 2}),
        ("ddp", {"ranks_per_node": 1, "packing": "packed"}),
        ("fsdp", {"packing": "packed", "sequence_parallel": 2}),
    ],
    ids=["zero3", "ddp on one rank, packed", "ranks that share rows"],
)
def test_every_engine_and_number_of_ranks_has_the_same_accuracy(
    with_tasks: Bench, trained: Path, strategy: str, more: dict[str, Any]
) -> None:
    settings = {**TRAINED, **more}
    if "sequence_parallel" in more:  # which generated answers do not allow
        settings["validation_tasks"] = TRAINED["validation_tasks"][:2]
    packed = "packing" in more
    name = f"with-tasks-{'-'.join([strategy, *more])}"
    like = with_tasks.run("with-tasks-packed", "zero2", **TRAINED, packing="packed") if packed else trained
    expected = accuracies(like)
    for task, values in accuracies(with_tasks.run(name, strategy, **settings), settings["validation_tasks"]).items():
        assert values == expected[task], task


def test_stopped_and_resumed_it_is_the_same_bytes(with_tasks: Bench, trained: Path) -> None:
    """Twice, of which at least one leaves steps before a validation or the figures of one in the checkpoint."""
    for _ in range(2):
        run = with_tasks.begin("with-tasks-stopped", "zero2", **TRAINED)
        rank_process(run.pid, 0)
        os.kill(run.pid, signal.SIGUSR1)
        assert run.wait() == STOPPED, run.errors()
    resumed = with_tasks.run("with-tasks-stopped", "zero2", **TRAINED)
    for file in FILES:
        assert (resumed / file).read_bytes() == (trained / file).read_bytes(), file


def test_other_rows_start_a_new_training(with_tasks: Bench, trained: Path) -> None:
    file = with_tasks.folder / "tasks/capitals.jsonl"
    whole = file.read_text()
    file.write_text("".join(whole.splitlines(keepends=True)[1:]))
    again = with_tasks.start("with-tasks-edited", "zero2", **TRAINED, checkpoints="with-tasks")
    file.write_text(whole)
    assert again.returncode == 0, again.stderr
    assert (
        json.loads((with_tasks.folder / "with-tasks-edited/metrics/train_resources.json").read_text())["resumes"] == 0
    )


def test_unusable_rows_are_one_line_before_the_model_is_loaded(with_tasks: Bench) -> None:
    file = with_tasks.folder / "tasks/capitals.jsonl"
    whole = file.read_text()
    row = json.loads(whole.splitlines()[0])
    file.write_text(json.dumps(row | {"prompt": "word " * 3000}) + "\n")
    long = with_tasks.start("with-tasks-long", "zero2", **TRAINED)
    file.unlink()
    absent = with_tasks.start("with-tasks-long", "zero2", **TRAINED)
    file.write_text(whole)
    for result, said in (
        (long, "prompt and choice have"),
        (absent, "capitals.jsonl: is missing; run `zerolora stage task_rows`"),
    ):
        assert result.returncode == 2 and said in result.stderr, result.stderr
        assert "Traceback" not in result.stderr
