"""An evaluation task is added to a copy of the project as docs/extending.md says, and the project evaluates with it."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import ROOT, Project
from engines import edit_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_documented_task_is_one_file(make_project: Callable[[str], Project]) -> None:
    text = (ROOT / "docs/extending.md").read_text()
    found = re.search(r"`(src/zerolora/evaluate/tasks/\w+\.py)`:\n\n```python\n(.*?)```", text, re.S)
    assert found
    project = make_project("task")
    (project.directory / found[1]).write_text(found[2])
    project.run("python", "-m", "pytest", "-q", "tests/unit/test_tasks.py", "-k", "words")
    edit_config(project, **{"prepare.rows.check": "words"})
    project.snakemake("results/base/rows/evaluate.json")
    metrics = json.loads((project.directory / "results/base/rows/evaluate.json").read_text())
    answers = json.loads((project.directory / "results/base/rows/answers.json").read_text())
    assert metrics["word_share"] == sum(answer["word_share"] for answer in answers) / len(answers)
