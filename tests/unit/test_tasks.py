"""Every evaluation task on its own examples, and the project's tasks on edge cases."""

from pathlib import Path

import pytest
from conftest import ROOT

from zerolora.config.schema import AskedTask, Prepare
from zerolora.data.reference import PREFIX
from zerolora.evaluate import tasks
from zerolora.evaluate.tasks import TASKS
from zerolora.evaluate.tasks.task import Judgement
from zerolora.testing import check_task


@pytest.mark.parametrize("name", TASKS)
def test_task_judges_its_example_and_is_in_the_config(name: str) -> None:
    task = TASKS[name]
    check_task(task)
    for section, known in ((Prepare, task.ask == "generate"), (AskedTask, True)):
        assert (name in section.model_json_schema()["properties"]["check"]["anyOf"][0]["enum"]) == known
    assert (Path(tasks.__file__).parent / f"{name}.py").is_file()


def test_docs_list_every_task() -> None:
    text = (ROOT / "docs/tasks.md").read_text()
    assert [f"| `{task.name}` | {task.rule} |" in text for task in TASKS.values()] == [True] * len(TASKS)


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
def test_reference_task(answer: str, verdict: Judgement) -> None:
    assert TASKS["sum"].judge({"question": "5=", "expected": ""}, answer) == verdict


def test_exact_match_of_empty_answers_and_rows_without_prompt() -> None:
    assert TASKS["exact"].judge({"question": "", "expected": "Paris "}, "Paris") == Judgement(True, True)
    assert TASKS["exact"].judge({"question": "", "expected": "Paris"}, "") == Judgement(False, False)
    assert not TASKS["exact"].asks({"prompt": 0})
    assert TASKS["exact"].metrics([]) == {}
