"""Figures of benchmarks/evaluate, and waiting threads of an evaluation."""

import json
import subprocess
import sys
from pathlib import Path

import generation
import prompts_once
import pytest
import sampling
from conftest import ROOT, project_environment

from zerolora.commands.stage_functions import WAITING


@pytest.mark.parametrize(
    "command",
    [
        ["stage", "evaluate", "--settings", '{"check": "exact"}', "--data", "none"],
        ["stage", "task", "--settings", '{"kind": "harness", "tasks": ["none"], "files": {}}', "--data", "none"],
    ],
    ids=["evaluate", "task"],
)
def test_waiting_threads_of_an_evaluation_sleep(command: list[str], tmp_path: Path) -> None:
    """According to OpenMP. A task of the project spares the index of the harness' 13,000 tasks."""
    (tmp_path / "none").write_text('{"path": "none", "files": {}}')
    (tmp_path / "config/harness").mkdir(parents=True)
    (tmp_path / "config/harness/none.yaml").write_text("task: none\n")
    command = [sys.executable, "-m", "zerolora", *command, "--weights", "none", "--output", "out", "--answers", "a"]
    environment = {key: value for key, value in project_environment(ROOT).items() if key not in WAITING}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode and "GOMP_SPINCOUNT = '0'" in result.stderr


RESULT = generation.RESULT


def test_documented_tables_match_measurements() -> None:
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    if not RESULT.is_file():
        assert "<!-- speed -->\n<!-- end -->" in text
        return
    measured = json.loads(RESULT.read_text())
    assert generation.section(measured) in text
    free = measured["free"]
    assert free["zerolora"]["same_texts"] and measured["loaded"]["zerolora"]["same_texts"]
    assert free["zerolora"]["rows_per_second"] >= 8 * free[generation.REFERENCE]["rows_per_second"]


def test_documented_samples_match_measurements() -> None:
    """Each contestant in the same rounds; by transformers, zerolora draws the most."""
    measured = json.loads(sampling.RESULT.read_text())
    assert sampling.section(measured) in (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    rounds = {len(each["rounds"]) for each in measured["contestants"].values()}
    assert len(rounds) == 1 and rounds.pop() >= 3
    by_transformers = (sampling.TRL, sampling.CONTINUOUS, sampling.SWIFT)
    for name, each in measured["contestants"].items():
        assert not name.startswith(by_transformers) or min(each["ours_over_it"]["rounds"]) > 1, name


def test_documented_prompts_match_measurements() -> None:
    text = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    measured = json.loads(prompts_once.RESULT.read_text())
    assert prompts_once.section(measured) in text
    for each in measured["evaluations"].values():
        losses = [way["loss"] for way in each["ways"].values()]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
        assert min(ratio["median"] for ratio in each["loss_ratio"].values()) > 1
