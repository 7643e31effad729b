"""Snakemake's Slurm executor: each job is submitted once and followed by Slurm's own fields, arrays have equal jobs,
GPUs are requested by node, a job starts Snakemake once, and a Snakemake that ends cancels its jobs.

Imported by workflow/, so nothing here imports torch.
"""

import asyncio
import functools
import getpass
import importlib
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from zerolora.compat.slurm_queue import SACCT_FIELDS, SQUEUE_FIELDS, SlurmQueue, job_name
from zerolora.compat.versions import is_replaced, patch, replaced

LIBRARY = "snakemake-executor-plugin-slurm"
GATHERING_SECONDS = 30
"""Seconds that the first job of an array waits for others: longer than estimate and render take between two runs, but
short compared with the queue's wait."""


def patch_slurm_executor() -> None:
    """Apply this module's patches if this process submits jobs to Slurm."""
    executor: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if executor is not None:
        submitted_once(executor)
        followed_by_slurms_fields(executor)
        ends_with_its_jobs(executor)
        gpus_of_each_node(executor)
        one_snakemake_a_job(executor)
        jobs_named_by_stage_and_run(executor)


@patch(LIBRARY, upstream="snakemake-executor-plugin-slurm#320")
def submitted_once(executor: Any) -> None:
    """Submit jobs of equal resources as one array, each refused request once, and each task's own job.

    The executor reports a refusal as a failure, which Snakemake repeats (`retries`), and its own errors with a
    traceback. Of job arrays (`slurm-array-jobs`), it gives all tasks the resources of the first job. It submits an
    array only if Snakemake passes all ready jobs of the rule at once; others count as running but are not submitted
    (`run_jobs`, "Array job collection incomplete"). And each task starts the first job, which is to start the task's
    own (snakemake-executor-plugin-slurm-jobstep, `run_job`): with the resource `mpi`, which training has, it never
    does, and the others run inside a job whose outputs Snakemake has just removed. Here jobs of a rule are collected
    until no other is expected, at most GATHERING_SECONDS; those with equal resources become an array.
    """
    kind = executor.Executor
    if is_replaced(kind.run_jobs):
        return

    def run_jobs(self: Any, jobs: Iterable[Any]) -> None:
        arrays: list[Any] = []
        for job in jobs:
            if not job.is_group() and {"all", job.rule.name} & self.array_jobs:
                arrays.append(job)
            else:
                submit(self, [job])
        if arrays:
            _gathering(self).add(arrays)

    def submit(self: Any, jobs: list[Any]) -> None:
        queue, most = queue_of(executor, self), self.max_array_size
        for tasks in (jobs[first : first + most] for first in range(0, len(jobs), most)):
            queue.announce(tasks)
            for job in tasks:
                self.run_job_pre(job)
            self._job_submission_executor.submit(queue.submit, tasks)

    kind.run_jobs = replaced(run_jobs)
    kind.submit_together = submit


@patch(LIBRARY)
def followed_by_slurms_fields(executor: Any) -> None:
    """Follow each job's state, reason, nodes and times as Slurm has them, and treat a preempted job like a failed one.

    The executor reads the states alone, and of an array that waits none. Slurm preempts by REQUEUE, after which the job
    is pending, or by CANCEL, after which it ends as PREEMPTED. The executor assumes the first and waits forever
    (check_active_jobs, `status == "PREEMPTED"`). Only states from the controller (squeue) are changed: there a requeued
    job is PENDING at once, while accounting (sacct) reports it as PREEMPTED until it runs again. And Snakemake retries
    a job that its user has cancelled.
    """
    kind = executor.Executor
    if is_replaced(kind.check_active_jobs):
        return
    check, success, error = kind.check_active_jobs, kind.report_job_success, kind.report_job_error

    async def check_active_jobs(self: Any, active_jobs: list[Any]) -> Any:
        queue = queue_of(executor, self)

        async def query_job_status(command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
            began = time.monotonic()
            rows = await queue.query(_with_fields(command))
            if rows is None:
                return None, None
            queue.follow({row.number: row for row in rows})
            from_controller = command.startswith("squeue")
            states = {
                row.number: "FAILED" if from_controller and row.state == "PREEMPTED" else row.state for row in rows
            }
            return states, time.monotonic() - began

        executor.query_job_status = query_job_status
        async for job in check(self, active_jobs):
            yield job

    def report_job_success(self: Any, job_info: Any) -> None:
        queue_of(executor, self).forget(job_info.external_jobid)
        success(self, job_info)

    def report_job_error(self: Any, job_info: Any, msg: str | None = None, **options: Any) -> None:
        queue_of(executor, self).forget(job_info.external_jobid)
        error(self, job_info, msg, **options)

    kind.check_active_jobs = replaced(check_active_jobs)
    kind.report_job_success, kind.report_job_error = report_job_success, report_job_error


@patch(LIBRARY)
def ends_with_its_jobs(executor: Any) -> None:
    """Make a Snakemake that is interrupted, or gets SIGTERM, cancel its jobs and end within seconds.

    After SIGTERM Snakemake waits for its jobs, days if need be, while sites let SIGKILL follow. After Ctrl-C it cancels
    the jobs that it knows, which are none while it asks for their states (RemoteExecutor, `_wait_for_jobs`). In both
    cases, and at the end of each run, it waits until the pause between two checks has passed, up to three minutes.
    """
    from snakemake.scheduling.job_scheduler import JobScheduler

    kind = executor.Executor
    if is_replaced(kind.cancel):
        return
    shutdown, exit_gracefully = kind.shutdown, JobScheduler.exit_gracefully

    def cancel(self: Any) -> None:
        _gathering(self).drop()
        queue_of(executor, self).cancel()
        self.shutdown()

    def shut_down(self: Any) -> None:
        queue_of(executor, self).ending.set()
        shutdown(self)

    async def sleep(self: Any) -> None:
        ending, end = queue_of(executor, self).ending, time.monotonic() + self.next_seconds_between_status_checks
        while not ending.is_set() and time.monotonic() < end:
            await asyncio.sleep(0.2)

    def on_sigterm(self: Any, *arguments: Any) -> None:
        if not isinstance(self._executor, kind):
            exit_gracefully(self, *arguments)
        elif not queue_of(executor, self._executor).ending.is_set():
            raise KeyboardInterrupt

    kind.cancel, kind.shutdown, kind.sleep = replaced(cancel), shut_down, sleep
    JobScheduler.exit_gracefully = on_sigterm


@patch(LIBRARY)
def gpus_of_each_node(executor: Any) -> None:
    """Make the executor request a job's GPUs only by node (`gres`) if the job also has their number (`gpu`).

    Snakemake counts `gpu`. The executor would pass both to sbatch, which older sites refuse (`--gpus` needs
    select/cons_tres), and refuses both itself when it selects a partition (`slurm-partition-config`).
    """
    partitions = importlib.import_module("snakemake_executor_plugin_slurm.partitions")
    for module, name in ((executor, "set_gres_string"), (partitions, "parse_gpu_requirements")):
        original = getattr(module, name)
        if not is_replaced(original):
            setattr(module, name, replaced(functools.partial(_by_node, original)))


@patch(LIBRARY)
def one_snakemake_a_job(executor: Any) -> None:
    """Make the Snakemake that a job's script starts run the job itself.

    The executor lets it start a second one, in a step of its own (snakemake-executor-plugin-slurm-jobstep), which reads
    the workflow again: seconds, for each of a run's jobs. The step has the job's cores and memory, as the script has.
    """
    kind = executor.Executor
    if not is_replaced(kind.additional_general_args):
        kind.additional_general_args = replaced(_no_further_args)


def _no_further_args(_: Any) -> str:
    return ""


@patch(LIBRARY)
def jobs_named_by_stage_and_run(executor: Any) -> None:
    """Name each job after its stage and run, as in train-default, and an array after its stage and the runs.

    The executor gives all jobs of a workflow a random name, by which it queries their states and reports their
    efficiency. Here it queries the states of all of the user's jobs, of which it reads those that it submitted.
    """
    if is_replaced(executor.get_submit_command):
        return
    report: Any = importlib.import_module("snakemake_executor_plugin_slurm.efficiency_report")
    submit, submitted, read = executor.get_submit_command, executor.validate_or_get_slurm_job_id, report.get_sacct_data
    names: set[str] = set()
    jobs: set[str] = set()

    def get_submit_command(job: Any, params: dict[str, Any], *arguments: Any, **options: Any) -> str:
        prefix = params["run_uuid"].rpartition("_")[0]  # slurm-jobname-prefix
        name = "_".join(filter(None, (prefix, params.get("name", job_name([job])))))
        names.add(name)
        command: str = submit(job, params | {"run_uuid": name}, *arguments, **options)
        return command

    def validate_or_get_slurm_job_id(*arguments: Any) -> str:
        job: str = submitted(*arguments)
        jobs.add(job)
        return job

    def get_sacct_data(_: str, logger: Any) -> list[str] | None:
        lines: list[str] | None = read(",".join(names), logger)
        return lines and [line for line in lines if re.split(r"\D", line, maxsplit=1)[0] in jobs]

    executor.get_submit_command = replaced(get_submit_command)
    executor.validate_or_get_slurm_job_id = replaced(validate_or_get_slurm_job_id)
    report.get_sacct_data = replaced(get_sacct_data)
    for name in ("query_job_status_squeue", "query_job_status_sacct"):
        setattr(executor, name, replaced(functools.partial(_of_user, getattr(executor, name))))


def _with_fields(command: str) -> str:
    """Return the call of squeue or sacct with all that is followed, and a line for each task of an array."""
    words = shlex.split(command)
    fields = SQUEUE_FIELDS if words[0] == "squeue" else SACCT_FIELDS
    words = [f"--format={fields}" if word.startswith("--format=") else word for word in words]
    return shlex.join([*words, "--array"] if words[0] == "squeue" else words)


def _of_user(original: Callable[[str], str], run: str) -> str:
    command = shlex.split(original(run))
    by_name = command.index("--name")
    command[by_name : by_name + 2] = ["--user", getpass.getuser()]
    return shlex.join(command)


def _by_node(original: Callable[[Any], Any], job: Any) -> Any:
    return original(_WithoutCount(job) if job.resources.get("gres") else job)


class _WithoutCount:
    """A job without the resource `gpu`."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self.resources = _Resources({name: value for name, value in job.resources.items() if name != "gpu"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


class _Resources(dict[str, Any]):
    """Resources by name, also as attributes."""

    __getattr__ = dict.__getitem__


class Gathering:
    """The jobs of an executor that wait for an array, by rule."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._waiting: dict[str, list[Any]] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._seen: set[Any] = set()
        self._lock = threading.Lock()

    def add(self, jobs: list[Any]) -> None:
        """Add jobs, and submit those of rules for which no other job is expected."""
        with self._lock:
            self._seen.update(jobs)
            for job in jobs:
                self._waiting.setdefault(job.rule.name, []).append(job)
            expected = {job.rule.name for job in self._executor.workflow.dag.needrun_jobs() if job not in self._seen}
            for rule in {job.rule.name for job in jobs}:
                if rule not in expected:
                    self._submit(rule)
                elif rule not in self._timers:
                    timer = self._timers[rule] = threading.Timer(GATHERING_SECONDS, self._end, [rule])
                    timer.daemon = True
                    timer.start()

    def drop(self) -> None:
        """Discard all waiting jobs."""
        with self._lock:
            for rule in list(self._waiting):
                self._pop(rule)

    def _end(self, rule: str) -> None:
        with self._lock:
            self._submit(rule)

    def _submit(self, rule: str) -> None:
        alike: dict[tuple[Any, ...], list[Any]] = {}
        for job in self._pop(rule):
            alike.setdefault(_request(job), []).append(job)
        for jobs in alike.values():
            self._executor.submit_together(jobs)

    def _pop(self, rule: str) -> list[Any]:
        timer = self._timers.pop(rule, None)
        if timer is not None:
            timer.cancel()
        return self._waiting.pop(rule, [])


def _gathering(executor: Any) -> Gathering:
    if not hasattr(executor, "zerolora_gathering"):
        executor.zerolora_gathering = Gathering(executor)
    result: Gathering = executor.zerolora_gathering
    return result


def queue_of(plugin: Any, executor: Any) -> SlurmQueue:
    """Return the queue of an executor."""
    # Two threads may be the first: the executor starts one in its constructor.
    result: SlurmQueue = vars(executor).setdefault("zerolora_queue", SlurmQueue(plugin, executor))
    return result


def _request(job: Any) -> tuple[Any, ...]:
    """Return the resources that a job requests from sbatch."""
    return job.threads, *sorted((name, str(value)) for name, value in job.resources.items() if name != "tmpdir")
