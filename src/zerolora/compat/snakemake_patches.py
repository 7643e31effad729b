"""Snakemake: replanning after unchanged outputs, hooks around planning and jobs, and error messages.

Imported by workflow/, so nothing here imports torch.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.compat.versions import is_replaced, patch, replaced
from zerolora.errors import explained


@patch("snakemake")
def explain_system_errors() -> None:
    """Make Snakemake print an OSError, such as a full disk, in one line: file, reason, remedy. It prints a
    traceback."""
    from snakemake import exceptions

    original = exceptions.format_exception_to_string
    if is_replaced(original):
        return

    def format_exception_to_string(error: BaseException, linemaps: Any = None) -> Any:
        return explained(error) if isinstance(error, OSError) else original(error, linemaps)

    exceptions.format_exception_to_string = replaced(format_exception_to_string)


@patch("snakemake", upstream="none known; docs/engine-sync.md")
def replan_after_same_outputs() -> None:
    """Make Snakemake replan when a finished job wrote an output that a pending job has read before, unchanged.

    Snakemake plans for the worst case, that each job changes its outputs, and replans only after a checkpoint, at a
    cost that grows with all jobs. Here any job causes a new plan, if the checksum of an output is the one that
    Snakemake recorded for a pending job. The pending jobs' reasons are reset first: Snakemake adds to earlier reasons,
    so a job that was expected to have changed inputs would run with unchanged ones, and jobs behind it would be
    forgotten. So a stage runs if its inputs have changed, as with DVC. docs/engine-sync.md lists the alternatives that
    were tried; tests/workflow/test_decisions.py compares with an oracle.
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
    """Return whether an output of a finished job has the checksum recorded for a pending job that reads it."""
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


@patch("snakemake")
def undetermined() -> Any:
    """Return the value of a resource that is unknown until other jobs have run; Snakemake evaluates it again later.

    Snakemake uses this value when a resource function fails for a missing input file (rules.py, expand_resources), but
    the files that determine our resources are not inputs of every job.
    """
    from snakemake.common.tbdstring import TBDString

    return TBDString()


@patch("snakemake")
def replace_write_protected_outputs() -> None:
    """Let a job replace write-protected outputs.

    DVC links outputs from its cache and write-protects them, so that no editor changes the cache. Snakemake refuses to
    run a job with write-protected outputs, although it removes them before, and removing a link does not change the
    cache.
    """
    from snakemake.jobs import Job

    async def check_protected_output(job: Any) -> None:
        return None

    Job.check_protected_output = check_protected_output


@patch("snakemake")
def around_planning(workflow: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` between reading the workflow and planning, and `after` when all jobs are planned.

    Snakemake does not know whether this is a dry run while it reads the Snakefile. Its own hooks are not called if
    there is nothing to do.
    """
    original = workflow._build_dag

    def build_dag() -> None:
        before()
        original()
        after()

    workflow._build_dag = build_dag


@patch("snakemake")
def after_each_job(workflow: Any, action: Callable[[Any], None]) -> None:
    """Call `action` with each job that succeeded, before any other job uses its outputs.

    Snakemake's own hooks (onsuccess, onerror) are called once, at the end, and not at all if the process is killed.
    """
    dag = workflow.dag
    original = dag.finish

    async def finish(job: Any, update_checkpoint_dependencies: bool = True) -> None:
        for part in job if job.is_group() else [job]:
            action(part)
        await original(job, update_checkpoint_dependencies=update_checkpoint_dependencies)

    dag.finish = finish


@patch("snakemake")
def before_each_job(workflow: Any, action: Callable[[Any], None]) -> None:
    """Call `action` with each job that is about to start, before Snakemake removes its outputs.

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


class UsedModule(NamedTuple):
    """The `module` statement through which a Snakefile is read."""

    name: str
    prefix: str
    replaces_prefix: bool
    config: dict[str, Any] | None
    """Its `config:`; None without one."""


@patch("snakemake")
def module_of(workflow: Any) -> UsedModule | None:
    """Return the module that is read now; None for the main Snakefile. Snakemake does not show a module its prefix."""
    modifier = workflow.modifier
    if modifier.is_main_snakefile():
        return None
    prefix, replaces, paths = "", False, modifier.path_modifier
    while paths is not None:
        prefix, replaces = (paths.prefix or "") + prefix, replaces or paths._prefix_replacements is not None
        paths = paths.inner_modifier
    config = dict(modifier.globals["config"]) if modifier.skip_configfile else None
    return UsedModule(str(modifier.namespace), prefix, replaces, config)


@patch("snakemake")
def run_again(workflow: Any, outputs: Iterable[str]) -> None:
    """Make Snakemake run the jobs of these outputs, as it does for incomplete ones; no public function does."""
    workflow.dag.forcefiles.update(outputs)


@patch("snakemake")
def run_with_until(workflow: Any, rule: str) -> None:
    """Add a rule to those of `--until` before planning, which Snakemake allows only on its command line."""
    dag = workflow.dag
    if dag.untilrules or dag.untilfiles:
        dag.untilrules.add(rule)


@patch("snakemake")
def run_with_targets(workflow: Any, rule: str) -> None:
    """Add a rule to the targets before planning, which Snakemake takes from its command line or the default alone."""
    workflow.dag.targetrules.add(workflow.get_rule(rule))


@patch("snakemake")
def count_as_done(workflow: Any, outputs: Iterable[str]) -> None:
    """Exclude the jobs of these outputs from the plan of a dry run, whatever Snakemake's metadata.

    The metadata may be out of date, and a dry run does not update it (`--touch`).
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


@patch("snakemake")
def ignore_broken_metadata() -> None:
    """Treat metadata that is not UTF-8 or has another structure as missing: Snakemake ends with a traceback.

    It does treat metadata that is not JSON as missing.
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


@patch("snakemake")
def without_metadata(workflow: Any, outputs: Iterable[str]) -> list[str]:
    """Return the outputs without readable metadata, which has parameters, code and inputs of their job.

    Snakemake considers such a file up to date, whatever changes.
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
    return bool(value)  # Snakemake treats {} as missing
