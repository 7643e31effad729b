"""Snakemake: how it decides again after a checkpoint, what is called before it plans and around each job, and others.

Imported by workflow/, so nothing here imports torch.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zerolora.compat.versions import is_replaced, patch, replaced
from zerolora.errors import explained

VERSION = "9.27.1"


@patch("snakemake", VERSION, upstream="none known")
def explain_system_errors() -> None:
    """Make Snakemake print what the operating system refuses, such as a full disk, in one line: file, reason, remedy.

    Its own line for an OSError is a traceback.
    """
    from snakemake import exceptions

    original = exceptions.format_exception_to_string
    if is_replaced(original):
        return

    def format_exception_to_string(error: BaseException, linemaps: Any = None) -> Any:
        return explained(error) if isinstance(error, OSError) else original(error, linemaps)

    exceptions.format_exception_to_string = replaced(format_exception_to_string)


@patch("snakemake", VERSION, upstream="none known; docs/engine-sync.md")
def replan_after_same_outputs() -> None:
    """Make Snakemake plan the pending jobs again where a finished job wrote a file that one of them has read before.

    It plans for the worst case, that each job changes its outputs, and revises its plan after a checkpoint alone, at a
    cost that grows with all jobs. Here any job causes a new plan, but only where the checksum of an output is the one
    that Snakemake recorded for a pending job. Its reasons are dropped before: Snakemake adds to the earlier ones, so a
    job that was expected to see changed inputs would run although they are the same, and a job that was hidden behind
    such a job would be forgotten. So it decides as DVC does: a stage runs if what it reads has changed.
    docs/engine-sync.md lists what else was tried; tests/workflow/test_decisions.py compares with an oracle.
    """
    from snakemake.dag import DAG

    if is_replaced(DAG.finish):
        return
    update_needrun, finish = DAG.update_needrun, DAG.finish

    async def reset_and_update_needrun(dag: Any, create_inventory: bool = False) -> None:
        for job in list(dag.jobs):
            if not dag.finished(job) and job not in dag._running:
                dag._reason.pop(job, None)
        await update_needrun(dag, create_inventory)

    async def finish_and_replan(dag: Any, job: Any, update_checkpoint_dependencies: bool = True) -> Any:
        ready = await finish(dag, job, update_checkpoint_dependencies=update_checkpoint_dependencies)
        executed = not (dag.workflow.dryrun or dag.workflow.touch)
        if executed and await _wrote_what_was_read(dag, job):
            await dag.postprocess()
            return True
        return ready

    DAG.update_needrun = replaced(reset_and_update_needrun)
    DAG.finish = replaced(finish_and_replan)


async def _wrote_what_was_read(dag: Any, job: Any) -> bool:
    """Return whether an output of a finished job has the checksum that is recorded for a pending job which reads it."""
    compared: dict[tuple[str, str], bool] = {}
    for part in job if job.is_group() else [job]:
        for reader, files in dag.depending[part].items():
            if not dag.needrun(reader) or dag.finished(reader):
                continue
            for file in files:
                recorded = dag.workflow.persistence.input_checksums(reader, file)
                checksum = recorded.pop() if len(recorded) == 1 else None
                if checksum and (file, checksum) not in compared:
                    compared[file, checksum] = await file.is_same_checksum(checksum, dag.max_checksum_file_size)
                    if compared[file, checksum]:
                        return True
    return False


@patch("snakemake", VERSION, upstream="none known")
def undetermined() -> Any:
    """Return the value of a resource that is not known until other jobs have run; Snakemake then asks again.

    Snakemake itself uses this value when a resource function fails for a missing input file (rules.py,
    expand_resources), but the files that tell our resources are not inputs of every job.
    """
    from snakemake.common.tbdstring import TBDString

    return TBDString()


@patch("snakemake", VERSION, upstream="none known")
def replace_write_protected_outputs() -> None:
    """Let a job replace outputs that are write-protected.

    DVC links outputs from its cache and takes their write permission, so that an editor cannot change the cache.
    Snakemake refuses to run a job whose outputs are write-protected. It removes them before the job runs, and removing
    a link leaves the cache as it is.
    """
    from snakemake.jobs import Job

    async def check_protected_output(job: Any) -> None:
        return None

    Job.check_protected_output = check_protected_output


@patch("snakemake", VERSION, upstream="none known")
def around_planning(workflow: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` once the workflow is read and before any job is planned, and `after` when all are.

    At that point Snakemake knows whether this is a dry run; while the Snakefile is read it does not. Its own hooks are
    not called where nothing is to be done.
    """
    original = workflow._build_dag

    def build_dag() -> None:
        before()
        original()
        after()

    workflow._build_dag = build_dag


@patch("snakemake", VERSION, upstream="none known")
def after_each_job(workflow: Any, action: Callable[[Any], None]) -> None:
    """Call `action` with every job that has ended well and whose outputs are there, before any other starts on them.

    Snakemake's own hooks (onsuccess, onerror) are called once, at the end, and not at all if the process is killed.
    """
    dag = workflow.dag
    original = dag.finish

    async def finish(job: Any, update_checkpoint_dependencies: bool = True) -> None:
        for part in job if job.is_group() else [job]:
            action(part)
        await original(job, update_checkpoint_dependencies=update_checkpoint_dependencies)

    dag.finish = finish


@patch("snakemake", VERSION, upstream="none known")
def before_each_job(workflow: Any, action: Callable[[Any], None]) -> None:
    """Call `action` with every job that is about to start, before Snakemake removes its outputs.

    Snakemake marks a job's outputs as incomplete only after it has removed them and submitted the job.
    """
    dag = workflow.dag
    original = dag.register_running

    def register_running(jobs: Any) -> None:
        for job in jobs:
            for part in job if job.is_group() else [job]:
                action(part)
        original(jobs)

    dag.register_running = register_running


@patch("snakemake", VERSION, upstream="none known")
def run_again(workflow: Any, outputs: Iterable[str]) -> None:
    """Have Snakemake run the jobs of these outputs, as it does with those that it calls incomplete."""
    workflow.dag.forcefiles.update(outputs)


@patch("snakemake", VERSION, upstream="none known")
def run_with_until(workflow: Any, rule: str) -> None:
    """Have a run with `--until`, before it is planned, make the targets of one more rule."""
    dag = workflow.dag
    if dag.untilrules or dag.untilfiles:
        dag.untilrules.add(rule)


@patch("snakemake", VERSION, upstream="none known")
def count_as_done(workflow: Any, outputs: Iterable[str]) -> None:
    """Leave the jobs that make one of these outputs out of what a dry run plans, whatever Snakemake knows of them.

    What it knows may be out of date, and a dry run does not have it renewed (`--touch`).
    """
    dag, known = workflow.dag, set(outputs)
    original = dag.update_needrun

    async def update_needrun(create_inventory: bool = False) -> None:
        done = {job for job in dag.jobs if not known.isdisjoint(job.output)} - dag._finished
        dag._finished |= done
        await original(create_inventory)
        dag._finished -= done
        dag._len = len(dag._finished | dag._needrun)

    dag.update_needrun = update_needrun


@patch("snakemake", VERSION, upstream="none known")
def ignore_broken_metadata() -> None:
    """Take metadata that is not UTF-8, or of another shape, for none: Snakemake ends with a traceback.

    It does so itself with metadata that is not JSON.
    """
    from snakemake.persistence.file import FilePersistence

    original = FilePersistence._read_record
    if is_replaced(original):
        return

    def _read_record(persistence: Any, key: str) -> Any:
        try:
            return original(persistence, key)
        except ValueError:
            return None

    FilePersistence._read_record = replaced(_read_record)


@patch("snakemake", VERSION, upstream="none known")
def without_metadata(workflow: Any, outputs: Iterable[str]) -> list[str]:
    """Return those of these outputs of which Snakemake has no metadata that it can read: parameters, code and inputs of
    their job.

    It takes such a file for up to date, whatever changes.
    """
    from snakemake.persistence.file import FilePersistence

    persistence = workflow.persistence
    if not isinstance(persistence, FilePersistence):
        return []
    return [
        output
        for output in outputs
        if not _is_metadata(Path(persistence._record_path(persistence._metadata_path, output)))
    ]


def _is_metadata(path: Path) -> bool:
    from snakemake.persistence import MetadataRecord

    try:
        value = json.loads(path.read_bytes())
        MetadataRecord.model_validate(value)
    except (OSError, ValueError):
        return False
    return bool(value)  # Snakemake takes {} for none
