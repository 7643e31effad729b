"""Job arrays: jobs with equal requests, submitted when no other job of their rule is expected."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerolora.compat import slurm_executor_patches
from zerolora.compat.slurm_executor_patches import Gathering


class Job:
    def __init__(self, rule: str, memory: int, threads: int = 1, tmpdir: str = "/local") -> None:
        self.rule, self.threads = SimpleNamespace(name=rule), threads
        self.resources = {"mem_mb": memory, "tmpdir": tmpdir}


class Executor:
    def __init__(self, jobs: list[Job]) -> None:
        self.submitted: list[list[Job]] = []
        self.workflow = SimpleNamespace(dag=SimpleNamespace(needrun_jobs=lambda: jobs))

    def _submit_job(self, job: Job) -> None:
        self.submitted.append([job])

    def _submit_array_jobs(self, jobs: list[Job]) -> None:
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


def test_every_job_of_a_refused_array_is_reported(tmp_path: Path) -> None:
    class Refused:
        max_array_size, slurm_logdir, run_uuid, _failed_nodes = 2, tmp_path, "run", ()
        workflow = SimpleNamespace(workdir_init=tmp_path, executor_settings=None)
        run_jobs = cancel = get_partition_arg = lambda *_: None

        def __init__(self) -> None:
            self.errors: list[tuple[Any, str]] = []

        def get_account_arg(self, job: Any) -> Iterator[str]:
            yield ""

        def format_job_exec(self, job: Any) -> str:
            return "true"

        def _report_job_error_threadsafe(self, job: Any, message: str) -> None:
            self.errors.append((job, message))

    plugin = SimpleNamespace(
        Executor=Refused,
        SubmittedJobInfo=lambda job: job,
        validate_slurm_extra=lambda job: None,
        get_submit_command=lambda *_, **__: "sh -c 'echo no such partition >&2; exit 1'",
        set_gres_string=lambda job: "",
    )
    slurm_executor_patches.arrays_of_equal_jobs(plugin)
    jobs = [
        SimpleNamespace(name="train", resources={}, wildcards=[f"run{number}"], is_group=lambda: False)
        for number in range(3)
    ]
    executor: Any = Refused()
    executor.run_array_jobs(jobs)
    assert [job for job, _ in executor.errors] == jobs
    assert all("was not submitted: no such partition" in message for _, message in executor.errors)


def test_an_array_is_named_after_its_runs() -> None:
    def named(*runs: str) -> str:
        jobs = [SimpleNamespace(name="train", wildcards=[run] if run else [], is_group=lambda: False) for run in runs]
        return slurm_executor_patches.job_name(jobs)

    assert named("default") == "train-default" and named("") == "train"
    assert named("first", "second") == "train-first+second"
    assert (
        named(*(f"run{number:03}" for number in range(20)))
        == "train-" + "+".join(f"run{number:03}" for number in range(8)) + "+"
    )
    assert named("a" * 100) == f"train-{'a' * 60}+"
