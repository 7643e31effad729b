"""Snakemake's Slurm executor: jobs are named after stage and run, preempted jobs end, job arrays have equal jobs, GPUs
are requested by node, and a job starts Snakemake once.

Imported by workflow/, so nothing here imports torch.
"""

import functools
import getpass
import importlib
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zerolora.compat.versions import is_replaced, patch, replaced

LIBRARY = "snakemake-executor-plugin-slurm"
GATHERING_SECONDS = 30
"""Seconds that the first job of an array waits for others: longer than estimate and render take between two runs, but
short compared with the queue's wait."""
EVENTS = {
    "CANCELLED": "was cancelled, so it is not submitted again; start Snakemake again to continue",
    "DEADLINE": "missed its deadline",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "used more memory than it requested",
    "PREEMPTED": "was preempted",
    "TIMEOUT": "reached its time limit",
}
"""What ended a job, by its state in Slurm."""
STARTED = ("RUNNING", "COMPLETING", "CONFIGURING", "STOPPED", "SUSPENDED")
REQUEUED = "is in the queue again: it lost a node, was preempted or requeued"
LONGEST_NAME = 60
"""Characters of the runs in an array's name."""


def patch_slurm_executor() -> None:
    """Apply this module's patches if this process submits jobs to Slurm."""
    executor: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if executor is not None:
        ends_in_its_own_words(executor)
        arrays_of_equal_jobs(executor)
        gpus_of_each_node(executor)
        one_snakemake_a_job(executor)
        jobs_named_by_stage_and_run(executor)


@patch(LIBRARY)
def ends_in_its_own_words(executor: Any) -> None:
    """Make the executor treat a preempted job like a failed one, print what Slurm did to a job, and never submit a
    cancelled one again.

    Slurm preempts by REQUEUE, after which the job is pending, or by CANCEL, after which it ends as PREEMPTED. The
    executor assumes the first and waits forever (check_active_jobs, `status == "PREEMPTED"`). Only states from the
    controller (squeue) are changed: there a requeued job is PENDING at once, while accounting (sacct) reports it as
    PREEMPTED until it runs again. The executor's messages name no cause, and Snakemake retries a job that its user has
    cancelled.
    """
    if is_replaced(executor.query_job_status):
        return
    query, report = executor.query_job_status, executor.Executor._report_job_submission_threadsafe
    submitted: dict[str, Any] = {}
    before: dict[str, str] = {}

    def report_job_submission(self: Any, job_info: Any) -> None:
        submitted[job_info.external_jobid] = job_info.job
        report(self, job_info)

    async def query_job_status(command: str, logger: Any) -> tuple[Mapping[str, str] | None, float | None]:
        states, seconds = await query(command, logger)
        for number, job in submitted.items():
            state = (states or {}).get(number, "").partition(" ")[0]  # as in CANCELLED by 1000
            last = before.get(number, "")
            if not state or state == last:
                continue
            before[number] = state
            event = REQUEUED if state == "PENDING" and last in STARTED else EVENTS.get(state)
            if event:
                logger.warning(f"{job_name([job])}: job {number} {event}")
            if state == "CANCELLED":
                job._attempt = job.restart_times + 1  # its property would compute the resources again
        if states and command.startswith("squeue"):
            states = {number: "FAILED" if state == "PREEMPTED" else state for number, state in states.items()}
        return states, seconds

    executor.query_job_status = replaced(query_job_status)
    executor.Executor._report_job_submission_threadsafe = replaced(report_job_submission)


@patch(LIBRARY)
def arrays_of_equal_jobs(executor: Any) -> None:
    """Restrict the executor's job arrays (`slurm-array-jobs`) to jobs with equal resources, and run each task's own
    job.

    The executor gives all tasks of an array the resources of its first job. It submits an array only if Snakemake
    passes all ready jobs of the rule at once; others count as running but are not submitted (`run_jobs`, "Array job
    collection incomplete"). And each task starts the first job, which is to start the task's own
    (snakemake-executor-plugin-slurm-jobstep, `run_job`): with the resource `mpi`, which training has, it never does,
    and the others run inside a job whose outputs Snakemake has just removed. Here jobs of a rule are collected until no
    other is expected, at most GATHERING_SECONDS. Those with equal resources become an array, whose script starts one
    job for each task; the others are submitted individually.
    """
    kind = executor.Executor
    if is_replaced(kind.run_jobs):
        return
    run_jobs, cancel = kind.run_jobs, kind.cancel
    announces = hasattr(kind, "_submit_job")  # from 2.8.0 on; before, no job was printed
    if not announces:
        kind._submit_job, kind._submit_array_jobs = _submit_job, _submit_array_jobs

    def run_jobs_in_arrays(self: Any, jobs: Iterable[Any]) -> None:
        arrays: list[Any] = []
        others: list[Any] = []
        for job in jobs:
            of_array = not job.is_group() and {"all", job.rule.name} & self.array_jobs
            (arrays if of_array else others).append(job)
        for job in others if not announces else ():
            self.run_job_pre(job)
        run_jobs(self, others)
        if arrays:
            _gathering(self).add(arrays)

    def run_array_jobs(self: Any, jobs: list[Any]) -> None:
        for first in range(0, len(jobs), self.max_array_size):
            tasks = jobs[first : first + self.max_array_size]
            try:
                _submit_array(executor, self, tasks)
            except Exception as error:  # without a report, Snakemake would wait for these jobs forever
                for job in tasks:
                    self._report_job_error_threadsafe(
                        executor.SubmittedJobInfo(job), f"the job array was not submitted: {error}"
                    )

    def cancel_gathered_too(self: Any) -> None:
        _gathering(self).drop()
        cancel(self)

    kind.run_jobs = replaced(run_jobs_in_arrays)
    kind.run_array_jobs = run_array_jobs
    kind.cancel = cancel_gathered_too


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


def job_name(jobs: list[Any]) -> str:
    """Return the name for a job, or for an array of one stage's jobs."""
    runs = "+".join(wildcards for job in jobs if (wildcards := _run_of(job)))
    if len(runs) > LONGEST_NAME:
        runs = f"{runs[:LONGEST_NAME].rpartition('+')[0] or runs[:LONGEST_NAME]}+"
    return "-".join(filter(None, (jobs[0].name, runs)))


def _run_of(job: Any) -> str:
    return "" if job.is_group() else "-".join(job.wildcards).replace("/", "-")


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


def _submit_array(executor: Any, self: Any, jobs: list[Any]) -> None:
    """Submit jobs as tasks 1, 2, … of one array, as the executor's `run_job` submits a single job."""
    for job in jobs:
        executor.validate_slurm_extra(job)
    log = self.slurm_logdir / f"rule_{jobs[0].name}" / "%A_%a.log"
    log.parent.mkdir(parents=True, exist_ok=True)

    command = _array_command(executor, self, jobs, log)
    result = subprocess.run(
        shlex.split(command), input=_array_script(self, jobs), capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{result.stderr.strip()}\n{command}")
    array = executor.validate_or_get_slurm_job_id(result.stdout.strip().split(";")[0], result.stdout)

    # Snakemake waits for each task as for a job of its own.
    tasks = {f"{array}_{number}": job for number, job in enumerate(jobs, start=1)}
    listed = ", ".join(f"{task} {_run_of(job)}" for task, job in tasks.items())
    self.logger.info(f"submitted a job array of {jobs[0].name}: {listed}")
    if cluster := _cluster_of(jobs[0]):
        self._submitted_job_clusters.add(cluster)  # those whose queues the executor asks for states
    for task, job in tasks.items():
        aux = {"slurm_logfile": log.with_name(f"{task}.log")}
        self._report_job_submission_threadsafe(executor.SubmittedJobInfo(job, external_jobid=task, aux=aux))


def _array_command(executor: Any, self: Any, jobs: list[Any], log: Any) -> str:
    """Return the call of sbatch, which reads the array's script from standard input."""
    job = jobs[0]  # all have its resources
    parameters = {
        "run_uuid": self.run_uuid,
        "name": job_name(jobs),
        "slurm_logfile": log,
        "comment_str": f"rule_{job.name}_array",
        "account": next(self.get_account_arg(job)),
        "partition": self.get_partition_arg(job),
        "workdir": self.workflow.workdir_init,
    }
    settings = self.workflow.executor_settings
    call = executor.get_submit_command(job, parameters, settings=settings, failed_nodes=self._failed_nodes)
    return f"{call}{executor.set_gres_string(job)} --array=1-{len(jobs)} /dev/stdin"


def _submit_job(self: Any, job: Any) -> None:
    """Do as the executor 2.8.0 does."""
    self.run_job_pre(job)
    self._job_submission_executor.submit(self.run_job, job)


def _submit_array_jobs(self: Any, jobs: list[Any]) -> None:
    """Do as the executor 2.8.0 does."""
    for job in jobs:
        self.run_job_pre(job)
    self._job_submission_executor.submit(self.run_array_jobs, jobs)


def _array_script(self: Any, jobs: list[Any]) -> str:
    """Return the script that each task runs, in which it finds its own job."""
    branches = [f"{task}) {self.format_job_exec(job)} ;;" for task, job in enumerate(jobs, start=1)]
    return "\n".join(["#!/bin/sh", 'case "$SLURM_ARRAY_TASK_ID" in', *branches, "esac", ""])


def _cluster_of(job: Any) -> str | None:
    """Return the cluster that a job asks for, by any of the executor's names for it."""
    names = ("cluster", "clusters", "slurm_cluster")
    return next((job.resources.get(name) for name in names if job.resources.get(name)), None)


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
            if len(jobs) == 1:
                self._executor._submit_job(jobs[0])
            else:
                self._executor._submit_array_jobs(jobs)

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


def _request(job: Any) -> tuple[Any, ...]:
    """Return the resources that a job requests from sbatch."""
    return job.threads, *sorted((name, str(value)) for name, value in job.resources.items() if name != "tmpdir")
