"""The evaluation tasks: every one on its own examples, and those of the project on edge cases."""

from pathlib import Path

import pytest
from conftest import ROOT

from zerolora.config.schema import AskedTask, Prepare
from zerolora.data.reference import PREFIX
from zerolora.evaluate import tasks
from zerolora.evaluate.tasks import TASKS
from zerolora.evaluate.tasks.task import Judgement


@pytest.mark.parametrize("name", TASKS)
def test_a_task_tells_right_from_wrong_and_the_config_knows_it(name: str) -> None:
    task = TASKS[name].configured(TASKS[name].example.settings)
    row = {"question": task.example.question, "expected": task.example.expected, "prompt": 3}
    assert task.asks(row)
    right, wrong = task.judge(row, task.example.right), task.judge(row, task.example.wrong)
    assert right.format and right.right == (task.ask != "loss") and not wrong.right
    assert right.scores.keys() == wrong.scores.keys()
    metrics = task.metrics([right, wrong])
    if task.ask != "loss":
        assert metrics["accuracy"] == 0.5
    means = {"generate": {"format_rate", "accuracy"}, "choices": {"accuracy"}, "loss": set()}[task.ask]
    assert set(metrics) == means | {*right.scores} | {*(task.corpus([right.material]) if task.corpus else ())}
    for section, known in ((Prepare, task.ask == "generate"), (AskedTask, True)):
        assert (name in section.model_json_schema()["properties"]["check"]["anyOf"][0]["enum"]) == known
    assert (Path(tasks.__file__).parent / f"{name}.py").is_file()


def test_the_docs_list_every_task() -> None:
    text = (ROOT / "docs/tasks.md").read_text()
    assert [f"| `{task.name}` | {task.rule} |" in text for task in TASKS.values()] == [True] * len(TASKS)


def test_rows_without_a_prompt_are_not_asked_and_yield_no_metrics() -> None:
    assert not TASKS["exact"].asks({"prompt": 0})
    assert TASKS["exact"].metrics([]) == {}


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (f"{PREFIX}1 + 4", Judgement(True, True)),
        (f"{PREFIX}1 + 5", Judgement(True, False)),
        (f"{PREFIX}1+4", Judgement(False, False)),
        (f"{PREFIX}1 + 4 = 5", Judgement(False, False)),
        ("1 + 4", Judgement(False, False)),
        ("", Judgement(False, False)),
    ],
)
def test_the_reference_task(answer: str, verdict: Judgement) -> None:
    assert TASKS["sum"].judge({"question": "5=", "expected": ""}, answer) == verdict


def test_an_empty_answer_has_no_format() -> None:
    assert TASKS["exact"].judge({"question": "", "expected": "Paris "}, "Paris") == Judgement(True, True)
    assert TASKS["exact"].judge({"question": "", "expected": "Paris"}, "") == Judgement(False, False)
