"""A tracker is added to a copy of the project as docs/extending.md says, and training writes to it."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import ROOT, Project
from engines import edit_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_documented_tracker_is_one_file_and_a_line(make_project: Callable[[str], Project]) -> None:
    text = (ROOT / "docs/extending.md").read_text()
    found = re.search(r"`(src/zerolora/train/telemetry/trackers/\w+\.py)`:\n\n```python\n(.*?)```", text, re.S)
    assert found
    project = make_project("tracker")
    (project.directory / found[1]).write_text(found[2])
    docs = project.directory / "docs/telemetry.md"
    docs.write_text(docs.read_text().replace("| `wandb` |", "| `jsonl` | yes | `steps.jsonl` | |\n| `wandb` |", 1))
    project.run("python", "-m", "pytest", "-q", "tests/unit/test_trackers.py", "-k", "jsonl")
    edit_config(project, **{"train.tracker": "jsonl"})
    project.snakemake("results/default/adapter/manifest.json")
    lines = (project.directory / "work/tracking/default/jsonl/steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "loss" in json.loads(lines[0])
