"""A stage is added to a copy of the project as docs/extending.md says, and both engines run it."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import ROOT, Project
from engines import dvc_changed, snakemake_would_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_documented_stage_is_four_files(make_project: Callable[[str], Project]) -> None:
    """It runs the whole pipeline of the tiny model, which takes a minute."""
    text = (ROOT / "docs/extending.md").read_text().split("\n## A stage\n")[1]
    module, rule = re.findall(r"```python\n(.*?)```", text, re.S)
    (entry,) = re.findall(r"```text\n(.*?)```", text, re.S)
    (dvc,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    project = make_project("stage")
    (project.directory / "src/zerolora/card.py").write_text(module)
    (project.directory / "workflow/rules/card.smk").write_text(rule)
    table = project.directory / "src/zerolora/stages.py"
    head, end = table.read_text().rsplit("    )\n}", 1)
    table.write_text(f"{head}{entry}    )\n}}{end}")
    pipeline = project.directory / "dvc.yaml"
    pipeline.write_text(f"{pipeline.read_text()}\n{dvc}")
    project.run("python", "-m", "pytest", "-q", "tests/unit/test_dvc_yaml.py")
    project.snakemake("all")
    summary = json.loads((project.directory / "results/default/summary.json").read_text())
    card = (project.directory / "results/default/card.md").read_text()
    assert card.splitlines() == [f"- {name}: {value}" for name, value in sorted(summary.items())]
    assert dvc_changed(project) == set()
    assert snakemake_would_run(project) == set()
