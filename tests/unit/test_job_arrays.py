"""Job arrays: jobs with equal requests, submitted when no other job of their rule is expected."""

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerolora.compat import slurm_executor_patches, slurm_queue
from zerolora.compat.slurm_executor_patches import Gathering
from zerolora.compat.slurm_queue import SlurmQueue, job_name


class Job:
    def __init__(self, rule: str, memory: int, threads: int = 1, tmpdir: str = "/local") -> None:
        self.rule, self.threads = SimpleNamespace(name=rule), threads
        self.resources = {"mem_mb": memory, "tmpdir": tmpdir}


class Executor:
    def __init__(self, jobs: list[Job]) -> None:
        self.submitted: list[list[Job]] = []
        self.workflow = SimpleNamespace(dag=SimpleNamespace(needrun_jobs=lambda: jobs))

    def submit_together(self, jobs: list[Job]) -> None:
        self.submitted.append(jobs)


def gathering(jobs: list[Job]) -> tuple[Any, Gathering]:
    executor = Executor(jobs)
    return executor, Gathering(executor)


def test_jobs_wait_for_the_others_of_their_rule() -> None:
    jobs = [Job("train", 100), Job("train", 100), Job("merge", 100), Job("evaluate", 9)]
    executor, gathered = gathering(jobs)
    gathered.add([jobs[0], jobs[2]])
    assert executor.submitted == [[jobs[2]]]
    gathered.add([jobs[1]])
    assert executor.submitted == [[jobs[2]], [jobs[0], jobs[1]]]


def test_array_contains_jobs_with_equal_requests() -> None:
    jobs = [Job("train", 100), Job("train", 200), Job("train", 100, tmpdir="/scratch"), Job("train", 100, threads=2)]
    executor, gathered = gathering(jobs)
    gathered.add(jobs)
    assert executor.submitted == [[jobs[0], jobs[2]], [jobs[1]], [jobs[3]]]


def test_retried_job_does_not_wait() -> None:
    jobs = [Job("train", 100), Job("train", 100)]
    executor, gathered = gathering(jobs)
    gathered.add(jobs)
    gathered.add([jobs[1]])
    assert executor.submitted == [jobs, [jobs[1]]]


def test_jobs_are_submitted_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_executor_patches, "GATHERING_SECONDS", 0.05)
    jobs = [Job("train", 100), Job("train", 100), Job("train", 100)]
    executor, gathered = gathering(jobs)
    gathered.add(jobs[:2])
    assert executor.submitted == []
    deadline = time.monotonic() + 600
    while not executor.submitted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert executor.submitted == [jobs[:2]]


def test_waiting_jobs_are_not_submitted_after_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_executor_patches, "GATHERING_SECONDS", 0.05)
    jobs = [Job("train", 100), Job("train", 100)]
    executor, gathered = gathering(jobs)
    gathered.add(jobs[:1])
    gathered.drop()
    time.sleep(0.2)
    assert executor.submitted == []


class Submitting:
    """An executor of which sbatch is another command."""

    slurm_logdir, run_uuid, _failed_nodes = Path(), "run", ()
    workflow = SimpleNamespace(workdir_init=Path(), executor_settings=None)

    def __init__(self) -> None:
        self.errors: list[tuple[Any, str]] = []
        self.said: list[str] = []
        self.logger = SimpleNamespace(log=lambda level, text, extra: self.said.append(text))

    def get_account_arg(self, job: Any) -> Iterator[str]:
        yield ""

    def get_partition_arg(self, job: Any) -> str:
        return ""

    def format_job_exec(self, job: Any) -> str:
        return "true"

    def _report_job_error_threadsafe(self, job: Any, message: str) -> None:
        self.errors.append((job, message))


def queue_with(sbatch: str) -> tuple[Submitting, SlurmQueue, list[Any]]:
    plugin = SimpleNamespace(
        SubmittedJobInfo=lambda job: job,
        validate_slurm_extra=lambda job: None,
        get_job_wildcards=lambda job: "",
        get_submit_command=lambda *_, **__: f"sh -c {shlex.quote(sbatch)}",
        set_gres_string=lambda job: "",
    )
    jobs = [
        SimpleNamespace(
            name="train",
            resources={},
            wildcards=[f"run{number}"],
            jobid=number,
            is_group=lambda: False,
            restart_times=3,
        )
        for number in range(3)
    ]
    executor = Submitting()
    return executor, SlurmQueue(plugin, executor), jobs


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put commands of Slurm on the path."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(folder)


def test_a_refused_array_is_one_line_and_each_of_its_jobs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, scontrol="exit 0")
    executor, queue, jobs = queue_with("echo 'sbatch: error: no such partition' >&2; exit 1")
    queue.submit(jobs)
    assert executor.said == ["train-run0+run1+run2: not submitted: sbatch: no such partition"]
    assert executor.errors == [(job, "sbatch: no such partition") for job in jobs]
    assert all(job._attempt > job.restart_times for job in jobs)  # so that Snakemake does not try again


def test_a_request_is_repeated_while_no_controller_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sbatch says meanwhile is not about the request."""
    commands(tmp_path, monkeypatch, scontrol="[ -e up ]")
    monkeypatch.setattr(slurm_queue, "AGAIN_SECONDS", 0.01)
    executor, queue, jobs = queue_with(
        "echo >> tries; [ $(wc -l < tries) -gt 2 ] && touch up; echo no answer >&2; exit 1"
    )
    queue.submit(jobs[:1])
    assert executor.said == [
        "train-run0: waits for Slurm's controller, which does not answer: no answer",
        "train-run0: not submitted: sbatch: no answer",
    ]
    assert (tmp_path / "tries").read_text().count("\n") == 3


def test_an_array_is_named_after_its_runs() -> None:
    def named(*runs: str) -> str:
        jobs = [SimpleNamespace(name="train", wildcards=[run] if run else [], is_group=lambda: False) for run in runs]
        return job_name(jobs)

    assert named("default") == "train-default" and named("") == "train"
    assert named("first", "second") == "train-first+second"
    assert (
        named(*(f"run{number:03}" for number in range(20)))
        == "train-" + "+".join(f"run{number:03}" for number in range(8)) + "+"
    )
    assert named("a" * 100) == f"train-{'a' * 60}+"
