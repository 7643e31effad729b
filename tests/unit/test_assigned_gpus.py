"""Jobs on one machine get different GPUs, wait for free ones, and are refused more than there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_driver import PretendedDriver

from zerolora.errors import UserError
from zerolora.machine import assigned_gpus, devices

NAMES = "4,GPU-ab,7"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, devices.VISIBLE: NAMES, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}


def job(environment: dict[str, str], each_node: int, granted: int | None = None) -> "subprocess.Popen[str]":
    numbers = [str(each_node), "1", str(each_node if granted is None else granted)]
    command = ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"; read -r line']
    return subprocess.Popen(
        [sys.executable, "-m", "zerolora.machine.assigned_gpus", *numbers, *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gpus_of(started: "subprocess.Popen[str]") -> list[str]:
    assert started.stdout
    return started.stdout.readline().strip().split(",")


def end(started: "subprocess.Popen[str]") -> str:
    return started.communicate("\n", timeout=600)[1]


def test_jobs_get_different_gpus_and_wait_for_more(environment: dict[str, str]) -> None:
    one, two = job(environment, 1), job(environment, 2)
    first, second = gpus_of(one), gpus_of(two)
    assert sorted([*first, *second]) == sorted(NAMES.split(",")) and len(first) == 1
    third = job(environment, 2)
    assert third.stderr
    assert third.stderr.readline() == "zerolora: waiting for 2 of 3 GPUs, which other jobs use now\n"
    end(one)  # one free GPU is too few
    end(two)
    assert len(set(gpus_of(third))) == 2
    assert end(third) == "" and third.returncode == 0


def test_a_killed_job_leaves_its_gpus_free(environment: dict[str, str]) -> None:
    first = job(environment, 3)
    gpus_of(first)
    first.kill()
    end(first)
    second = job(environment, 3)
    assert len(gpus_of(second)) == 3
    assert end(second) == ""


@pytest.mark.parametrize(
    ("each_node", "granted", "said"),
    [
        (4, 4, "4 GPUs needed, and this machine shows 3 (CUDA_VISIBLE_DEVICES=4,GPU-ab,7)"),
        (2, 1, "this job needs 2 GPUs, and Snakemake may give it 1 (--resources gpu=1"),
        (1, 0, "this job needs 1 GPU, and Snakemake may give it 0 (--resources gpu=0"),
    ],
)
def test_too_many_gpus_are_refused(environment: dict[str, str], each_node: int, granted: int, said: str) -> None:
    refused = job(environment, each_node, granted)
    text = end(refused)
    assert refused.returncode == 2 and text.startswith(f"zerolora: {said}") and text.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("file", "is not a directory"),
        ("link", "is a link"),
        ("open", "is open to other users (mode 755)"),
        ("lock", "turn.lock: Too many levels of symbolic links; remove that link"),
        ("gpu", "gpu-4.lock: Too many levels of symbolic links; remove that link"),
    ],
)
def test_locks_need_a_private_folder(environment: dict[str, str], tmp_path: Path, kind: str, said: str) -> None:
    """Other users know the folder's name and can create it in /tmp first."""
    folder, other = tmp_path / f"zerolora-gpus-{os.getuid()}", tmp_path / "other"
    other.write_text("content", encoding="utf-8")
    if kind == "file":
        folder.touch()
    elif kind == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o755 if kind == "open" else 0o700)
        if kind != "open":
            (folder / ("turn.lock" if kind == "lock" else "gpu-4.lock")).symlink_to(other)
    refused = job(environment, 1)
    text = end(refused)
    assert refused.returncode == 2 and text.startswith("zerolora: ") and text.count("\n") == 1
    assert said in text and other.read_text(encoding="utf-8") == "content"


def test_locks_in_a_folder_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(UserError, match=rf"locks: belongs to user {folder.stat().st_uid}, so .*another TMPDIR"):
        assigned_gpus.check_own(folder)


def test_a_command_that_needs_no_gpu_sees_none(environment: dict[str, str]) -> None:
    script = Path(__file__).parents[2] / "workflow/scripts/on_gpus"
    command = [str(script), "0", "1", "0", "sh", "-c", 'echo "[${CUDA_VISIBLE_DEVICES-unset}]"']
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_locks_use_physical_gpu_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 of one scheduler job is not GPU 0 of another; without assignment a job sees all."""
    monkeypatch.setattr(devices, "driver_library", lambda: PretendedDriver(9.0, 9.0))
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    keys = assigned_gpus.lockable()
    assert list(keys) == ["0", "1"] and len(set(keys.values())) == 2
    monkeypatch.setenv(devices.VISIBLE, "1,0")
    assert list(assigned_gpus.lockable()) == ["1", "0"]
    monkeypatch.setattr(devices, "driver_library", lambda: None)
    monkeypatch.delenv(devices.VISIBLE)
    assert assigned_gpus.lockable() == {}
    with pytest.raises(UserError, match="1 GPU needed, and this machine shows 0; run where"):
        assigned_gpus.check_visible(1, 0)


def test_a_task_that_sees_its_own_gpu_alone_is_not_refused(environment: dict[str, str]) -> None:
    """As with `srun --gpus-per-task=1`, of a training that needs four GPUs of each of two nodes."""
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", devices.VISIBLE: "2"}
    command = [sys.executable, "-m", "zerolora.machine.assigned_gpus", "4", "2", "8", "printenv", devices.VISIBLE]
    assert subprocess.run(command, env=environment | step, capture_output=True, text=True, check=True).stdout == "2\n"


def test_srun_tasks_use_their_assigned_gpus() -> None:
    assert not assigned_gpus.placed_by_srun({})
    assert not assigned_gpus.placed_by_srun({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"})
    assert assigned_gpus.placed_by_srun({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"})
