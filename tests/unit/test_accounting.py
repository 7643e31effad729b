"""Slurm accounting of a training, and its absence without Slurm. With a real Slurm: tests/slurm."""

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
        (["17.0"], []),  # unfinished
        (["17.0", "finished"], ["17.0"]),
        (["17.0", "18.0", "18.1", "finished"], ["17.0", "18.0", "18.1"]),
        (["17.0", "finished", "18.0", "finished"], ["18.0"]),
        (["17.0", "finished", "18.0"], ["17.0"]),  # a new training has begun
        (["17.0", "finished", "finished"], []),  # the last one was trained without Slurm
    ],
)
def test_steps_of_the_last_finished_training(lines: list[str], steps: list[str]) -> None:
    assert steps_of(lines) == steps


@pytest.mark.parametrize(("text", "count"), [("", 0), ("0", 0), ("1536K", 1536 * 1024), ("1.50G", 3 * 2**29)])
def test_sizes_parse_slurms_suffixes(text: str, count: int) -> None:
    assert size(text) == count


def accounted(steps: Path, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "accounting.py", steps]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path})


def test_without_slurm_steps_accounting_is_null(tmp_path: Path) -> None:
    assert accounted(tmp_path / "steps", "").stdout == "null\n"
    command = [SCRIPTS / "record_slurm_step", tmp_path / "steps", "echo", "said"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "said\n"
    assert not (tmp_path / "steps").exists()


def test_without_sacct_accounting_is_null(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("17.0\nfinished\n")
    result = accounted(tmp_path / "steps", str(tmp_path))
    assert result.stdout == "null\n"
    assert "not known from Slurm" in result.stderr
