"""A form of rows is added to a copy of the project as docs/extending.md says, and the project prepares with it."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import ROOT, Project
from engines import edit_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LINE = '| `quiz` | question, answer; hint | `{"question": "What is 1 + 4?", "answer": "5", "hint": "Less than 6."}` |'


def test_the_documented_form_is_one_file_and_a_line(make_project: Callable[[str], Project]) -> None:
    text = (ROOT / "docs/extending.md").read_text()
    found = re.search(r"`(src/zerolora/data/formats/\w+\.py)`:\n\n```python\n(.*?)```", text, re.S)
    assert found
    project = make_project("form")
    (project.directory / found[1]).write_text(found[2])
    docs = project.directory / "docs/data.md"
    docs.write_text(docs.read_text().replace("| `text` |", f"{LINE}\n| `text` |", 1))
    rows = [{"question": f"{number}?", "answer": f"{number}!", "hint": None} for number in range(20)]
    (project.directory / "rows.json").write_text(json.dumps(rows))
    project.run("python", "-m", "pytest", "-q", "tests/unit/test_formats.py", "-k", "example_and_stands")
    project.run("zerolora", "schema", "--output", "schema.json")
    assert '"quiz"' in (project.directory / "schema.json").read_text()
    for form, columns in (("auto", {}), ("quiz", {"hint": "hint"})):
        edit_config(project, **{"prepare.rows.format": form, "prepare.rows.columns": columns})
        project.snakemake("results/data/rows/manifest.json")
        stats = json.loads((project.directory / "results/data/rows/stats.json").read_text())
        assert stats["read_rows"] == 20 and stats["train_rows"] == 12
