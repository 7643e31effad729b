"""The jobs that a Snakemake has in Slurm's queue: submitted once, followed by Slurm's own fields, cancelled with it.

What the terminal shows of them goes to Snakemake's log with the attribute `slurm`, which the logger plugin turns into
lines (snakemake_logger_plugin_zerolora).

Imported by workflow/, so nothing here imports torch.
"""

import asyncio
import logging
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.errors import explained, printable
from zerolora.log import note_end

WAITING_SECONDS = 60
"""Seconds in the queue after which the terminal shows what a job waits for."""
AGAIN_SECONDS = 10
"""Seconds between the attempts to submit a job while no controller answers."""
QUERY_SECONDS, CANCEL_SECONDS = 60, 20
"""Seconds that squeue or sacct, and scancel, may take."""
EVENTS = {
    "CANCELLED": "was cancelled, so it is not submitted again; start Snakemake again to continue",
    "DEADLINE": "missed its deadline",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "used more memory than it requested",
    "PREEMPTED": "was preempted",
    "TIMEOUT": "reached its time limit",
}
"""What ended a job, by its state in Slurm; of others the terminal shows the state alone."""
REQUEUED = "is in the queue again: it lost a node, was preempted or requeued"
SQUEUE_FIELDS = "%i|%T|%N|%V|%S|%e|%r"
SACCT_FIELDS = "JobIDRaw,State,NodeList,Submit,Start,End"
NOTHING = ("", "None", "N/A", "Unknown", "None assigned", "(null)")
"""How Slurm's commands write a field without a value."""
LONGEST_NAME = 60
"""Characters of the runs in an array's name."""
PREFIX = re.compile(r"^sbatch: (error: )?")


class SlurmRecord(NamedTuple):
    """A job in squeue or sacct, whose fields are SQUEUE_FIELDS or SACCT_FIELDS; sacct has no reason in all releases."""

    number: str
    state: str
    nodes: str = ""
    submitted: str = ""
    started: str = ""
    ended: str = ""
    reason: str = ""

    @property
    def waited(self) -> int | None:
        """Seconds in the queue."""
        return _between(self.submitted, self.started)

    @property
    def ran(self) -> int | None:
        """Seconds from its start to its end."""
        return _between(self.started, self.ended)


@dataclass
class QueuedJob:
    """A job of Snakemake that Slurm has accepted."""

    number: str
    """Slurm's, as in 12 or 12_1."""
    job: Any
    since: float = field(default_factory=time.monotonic)
    """When it came into the queue."""
    state: str = ""
    ran_on: tuple[str, str] = ("", "")
    """Start and nodes when it was last seen to run."""
    reasons: set[str] = field(default_factory=set)
    """What it waited for, as shown."""


class SlurmQueue:
    """The jobs of one executor in the queue."""

    def __init__(self, plugin: Any, executor: Any) -> None:
        """`plugin` is the module of the executor."""
        self._plugin, self._executor = plugin, executor
        self._jobs: dict[str, QueuedJob] = {}
        """Those that have not ended, as far as is known."""
        self._lock = threading.Lock()
        self.ending = threading.Event()
        """Set when no job is to be submitted any more."""
        self._silent = False
        """Whether it was shown that no controller answers."""

    # Submission.

    def announce(self, jobs: list[Any]) -> None:
        """Let the logger plugin know that jobs are Slurm's before Snakemake logs their start."""
        self._tell(logging.INFO, "goes to Slurm", jobs, state="announced")

    def submit(self, jobs: list[Any]) -> None:
        """Submit a job, or several as tasks 1, 2, … of one array. What sbatch refuses is not submitted again."""
        try:
            self._submit(jobs)
        except Exception as error:
            words = explained(error) if isinstance(error, OSError) else " ".join(str(error).split())
            if not self.ending.is_set():
                self._tell(logging.ERROR, f"not submitted: {words}", jobs, state="refused")
            for job in jobs:
                job._attempt = job.restart_times + 1  # its property would compute the resources again
                self._executor._report_job_error_threadsafe(self._plugin.SubmittedJobInfo(job), words)

    def _submit(self, jobs: list[Any]) -> None:
        plugin, executor = self._plugin, self._executor
        for job in jobs:
            plugin.validate_slurm_extra(job)
        number, log = self._accepted(jobs)
        array = len(jobs) > 1
        tasks = {f"{number}_{task}" if array else number: job for task, job in enumerate(jobs, start=1)}
        with self._lock:
            for task, job in tasks.items():
                self._jobs[task] = QueuedJob(task, job)
        listed = f"array {number}: {', '.join(f'{task} {run_of(job)}' for task, job in tasks.items())}"
        self._tell(logging.INFO, f"submitted as job {listed if array else number}", jobs, state="submitted")
        if cluster := _cluster_of(jobs[0]):
            executor._submitted_job_clusters.add(cluster)  # those whose queues the executor asks for states
        for task, job in tasks.items():
            path = Path(str(log).replace("%A_%a", task).replace("%j", task))
            executor._report_job_submission_threadsafe(
                plugin.SubmittedJobInfo(job, external_jobid=task, aux={"slurm_logfile": path})
            )
        if self.ending.is_set():  # while sbatch ran
            self.cancel()

    def _accepted(self, jobs: list[Any]) -> tuple[str, Path]:
        """Return the number that sbatch gave a job or an array, and the pattern of its log's path.

        A refusal is final: sbatch itself waits and repeats what Slurm calls temporary (a full queue, busy nodes). Only
        if no controller answers does it say nothing about the request, which is then repeated once one does.

        Raises RuntimeError with sbatch's words.
        """
        command, script, log = self._command(jobs)
        log.parent.mkdir(parents=True, exist_ok=True)
        while not self.ending.is_set():
            result = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
            if not result.returncode:
                array = result.stdout.strip().split(";")[0]
                return self._plugin.validate_or_get_slurm_job_id(array, result.stdout), log
            words = "; ".join(PREFIX.sub("", line) for line in result.stderr.splitlines() if line.strip())
            if _answers():
                raise RuntimeError(f"sbatch: {words or f'exit code {result.returncode}'}")
            if not self._silent:
                self._silent = True
                self._tell(logging.WARNING, f"waits for Slurm's controller, which does not answer: {words}", jobs)
            self.ending.wait(AGAIN_SECONDS)
        raise RuntimeError("Snakemake ends")

    def _command(self, jobs: list[Any]) -> tuple[list[str], str, Path]:
        """Return the call of sbatch, the script that it reads from standard input, and the pattern of the log."""
        plugin, executor, job = self._plugin, self._executor, jobs[0]  # all have its resources
        kind, run = "group" if job.is_group() else "rule", plugin.get_job_wildcards(job)
        array = len(jobs) > 1
        folder = executor.slurm_logdir / f"{kind}_{job.name}"
        log = folder / "%A_%a.log" if array else folder / run / "%j.log"
        parameters = {
            "run_uuid": executor.run_uuid,
            "name": job_name(jobs),
            "slurm_logfile": log,
            "comment_str": f"rule_{job.name}" + ("_array" if array else f"_wildcards_{run}" if run else ""),
            "account": next(executor.get_account_arg(job)),
            "partition": executor.get_partition_arg(job),
            "workdir": executor.workflow.workdir_init,
        }
        settings = executor.workflow.executor_settings
        call = plugin.get_submit_command(job, parameters, settings=settings, failed_nodes=executor._failed_nodes)
        call += f"{plugin.set_gres_string(job)}{f' --array=1-{len(jobs)}' if array else ''} /dev/stdin"
        try:
            return shlex.split(call), self._script(jobs), log
        except ValueError as error:  # only the user's options are not quoted
            raise RuntimeError(f"slurm_extra: {job.resources.get('slurm_extra')}: {error}") from None

    def _script(self, jobs: list[Any]) -> str:
        """Return the script of a job, or of an array, in which each task finds its own job."""
        lines = [self._executor.format_job_exec(job) for job in jobs]
        if len(jobs) > 1:
            branches = [f"{task}) {line} ;;" for task, line in enumerate(lines, start=1)]
            lines = ['case "$SLURM_ARRAY_TASK_ID" in', *branches, "esac"]
        return "\n".join(["#!/bin/sh", *lines, ""])

    # States.

    async def query(self, command: str) -> list[SlurmRecord] | None:
        """Return the jobs that squeue or sacct lists; None if it does not answer."""
        if self.ending.is_set():
            return []
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        )
        reading, deadline = asyncio.ensure_future(process.communicate()), time.monotonic() + QUERY_SECONDS
        while not reading.done() and not self.ending.is_set() and time.monotonic() < deadline:
            await asyncio.wait({reading}, timeout=0.2)
        if not reading.done():
            process.kill()
            await reading
        output, _ = reading.result()
        if process.returncode:
            return [] if self.ending.is_set() else None
        columns = len(SlurmRecord._fields)
        rows = [line.split("|", columns - 1) for line in output.decode(errors="replace").splitlines()]
        return [
            SlurmRecord(*("" if text.strip() in NOTHING else text.strip() for text in row))
            for row in rows
            if len(row) > 1
        ]

    def follow(self, rows: Mapping[str, SlurmRecord]) -> None:
        """Report what has changed for each job since the last time."""
        waiting: dict[tuple[str, str], list[QueuedJob]] = {}
        for queued in list(self._jobs.values()):
            row = rows.get(queued.number)
            if row is None:
                continue
            state, before = row.state.partition(" ")[0], queued.state  # as in CANCELLED by 1000
            queued.state = state
            if state == "PENDING":
                if queued.ran_on != ("", ""):
                    queued.ran_on, queued.since, queued.reasons = ("", ""), time.monotonic(), set()
                    self._tell(logging.WARNING, REQUEUED, [queued.job], queued.number, state="submitted")
                waited = time.monotonic() - queued.since
                if row.reason and row.reason not in queued.reasons and waited >= WAITING_SECONDS:
                    queued.reasons.add(row.reason)
                    waiting.setdefault((queued.number.partition("_")[0], row.reason), []).append(queued)
            elif state == "RUNNING":
                if queued.ran_on != (row.started, row.nodes):
                    queued.ran_on = row.started, row.nodes
                    self._tell(
                        logging.INFO, f"runs on {row.nodes}", [queued.job], queued.number, state="running", row=row
                    )
            elif state != before:
                event = EVENTS.get(state, "")
                level = logging.WARNING if event else logging.INFO
                self._tell(level, event or f"is {state}", [queued.job], queued.number, state=state, row=row)
                if state != "COMPLETED":
                    because = f" ({row.reason})" if row.reason else ""
                    for log in queued.job.log:
                        note_end(Path(log), f"job {queued.number}: {state}{because}")
                if state == "CANCELLED":
                    queued.job._attempt = queued.job.restart_times + 1
        for (array, reason), jobs in waiting.items():
            number = jobs[0].number if len(jobs) == 1 else array
            self._tell(logging.INFO, f"waits: {reason}", [queued.job for queued in jobs], number, state="waiting")

    def forget(self, number: str) -> None:
        """Follow a job that has ended no more."""
        with self._lock:
            self._jobs.pop(number, None)

    # End.

    def cancel(self) -> None:
        """Cancel all jobs that have not ended, and submit no more."""
        self.ending.set()
        with self._lock:
            numbers, jobs = list(self._jobs), [queued.job for queued in self._jobs.values()]
            self._jobs.clear()
        if not numbers:
            return
        command = ["scancel", *(["--clusters=all"] if self._executor._submitted_job_clusters else []), *numbers]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=CANCEL_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            words = str(getattr(error, "stderr", None) or error).strip()
            text = f"could not be cancelled: {words}; run `{shlex.join(command)}`"
        else:
            text = "cancelled; run the same command to continue: training resumes from its last checkpoint"
        for number, job in zip(numbers, jobs, strict=True):
            for log in job.log:
                note_end(Path(log), f"job {number}: cancelled with Snakemake")
        word = "job" if len(numbers) == 1 else "jobs"
        self._executor.logger.warning(f"{word} {', '.join(numbers)} {text}")

    def _tell(self, level: int, text: str, jobs: list[Any], number: str = "", **values: Any) -> None:
        """Log what the logger plugin shows in the line of the jobs."""
        text = printable(f"job {number} {text}" if number and text else text)
        numbers = [part.jobid for job in jobs for part in (job.jobs if job.is_group() else [job])]
        about = {"jobs": numbers, "name": job_name(jobs), "text": text, "number": number, **values}
        self._executor.logger.log(level, f"{job_name(jobs)}: {text}", extra={"slurm": about})


def job_name(jobs: list[Any]) -> str:
    """Return the name for a job, or for an array of one stage's jobs."""
    runs = "+".join(wildcards for job in jobs if (wildcards := run_of(job)))
    if len(runs) > LONGEST_NAME:
        runs = f"{runs[:LONGEST_NAME].rpartition('+')[0] or runs[:LONGEST_NAME]}+"
    return "-".join(filter(None, (jobs[0].name, runs)))


def run_of(job: Any) -> str:
    """Return the values of a job's wildcards."""
    return "" if job.is_group() else "-".join(job.wildcards).replace("/", "-")


def _answers() -> bool:
    """Return whether a controller of the cluster answers."""
    return subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode == 0


def _cluster_of(job: Any) -> str | None:
    """Return the cluster that a job asks for, by any of the executor's names for it."""
    names = ("cluster", "clusters", "slurm_cluster")
    return next((job.resources.get(name) for name in names if job.resources.get(name)), None)


def _between(first: str, last: str) -> int | None:
    """Return the seconds between two of Slurm's times, None without one of them."""
    try:
        return max(0, int((datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()))
    except ValueError:
        return None
