"""benchmarks/evaluate in its smallest form, with a tiny model whose speed says nothing; and how evaluation waits."""

import json
import subprocess
import sys
from pathlib import Path

import generation
import pytest
from conftest import ROOT, project_environment

from zerolora.commands.stage_commands import WAITING


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "--settings", '{"check": "exact"}', "--data", "none"],
        ["task", "--settings", '{"kind": "harness", "tasks": ["none"], "files": {}}', "--data", "none"],
    ],
    ids=["evaluate", "task"],
)
def test_threads_of_an_evaluation_sleep_while_they_wait(command: list[str], tmp_path: Path) -> None:
    """OpenMP itself says so, when torch is loaded in a process of its own, which takes 3 s; there are no rows.

    The task is the project's own, so that lm-evaluation-harness does not index all of its thousands.
    """
    (tmp_path / "none").write_text('{"path": "none", "files": {}}')
    (tmp_path / "config/harness").mkdir(parents=True)
    (tmp_path / "config/harness/none.yaml").write_text("task: none\n")
    given = ["--weights", "none", "--output", "out", "--answers", "answers"]
    others = {key: value for key, value in project_environment(ROOT).items() if key not in WAITING}
    told = subprocess.run(
        [sys.executable, "-m", "zerolora", *command, *given],
        cwd=tmp_path,
        env=others | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode and "GOMP_SPINCOUNT = '0'" in told.stderr


RESULT = generation.RESULT


def test_the_tables_are_those_measured() -> None:
    """There is none where nothing was measured."""
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    if not RESULT.is_file():
        assert "<!-- speed -->\n<!-- end -->" in text
        return
    measured = json.loads(RESULT.read_text())
    assert generation.section(measured) in text
    free = measured["free"]
    assert free["zerolora"]["same_texts"] and measured["loaded"]["zerolora"]["same_texts"]
    assert free["zerolora"]["rows_per_second"] >= 8 * free[generation.REFERENCE]["rows_per_second"]
