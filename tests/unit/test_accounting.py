"""What Slurm is asked about a training, and what is said where there is no Slurm. On a real one: tests/slurm."""

import subprocess
import sys
from pathlib import Path

import pytest
from accounting import size, steps_of
from conftest import ROOT

SCRIPTS = ROOT / "workflow/scripts"


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        ([], []),
        (["17.0"], []),  # it has not finished
        (["17.0", "finished"], ["17.0"]),
        (["17.0", "18.0", "18.1", "finished"], ["17.0", "18.0", "18.1"]),
        (["17.0", "finished", "18.0", "finished"], ["18.0"]),
        (["17.0", "finished", "18.0"], ["17.0"]),  # what is being trained now is not what was
        (["17.0", "finished", "finished"], []),  # the last one was trained without Slurm
    ],
)
def test_the_steps_are_those_of_the_last_training_that_finished(lines: list[str], steps: list[str]) -> None:
    assert steps_of(lines) == steps


@pytest.mark.parametrize(("text", "count"), [("", 0), ("0", 0), ("1536K", 1536 * 1024), ("1.50G", 3 * 2**29)])
def test_sizes_are_read_as_slurm_writes_them(text: str, count: int) -> None:
    assert size(text) == count


def accounted(steps: Path, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "accounting.py", steps]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path})


def test_where_no_job_trained_nothing_is_asked(tmp_path: Path) -> None:
    assert accounted(tmp_path / "steps", "").stdout == "null\n"
    command = [SCRIPTS / "record_slurm_step", tmp_path / "steps", "echo", "said"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "said\n"
    assert not (tmp_path / "steps").exists()


def test_where_accounting_does_not_answer_the_report_goes_on(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("17.0\nfinished\n")
    result = accounted(tmp_path / "steps", str(tmp_path))
    assert result.stdout == "null\n"
    assert "not known from Slurm" in result.stderr
