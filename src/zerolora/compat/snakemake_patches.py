"""Snakemake: replanning after unchanged outputs, hooks around planning and jobs, and error messages.

Imported by workflow/, so nothing here imports torch.
"""

from collections.abc import Callable, Iterable
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
def start_after(workflow: Any, first: Callable[[Any], list[Any]]) -> None:
    """Start a job only after the jobs that `first` returns for it have ended, of those that are to run.

    Snakemake orders jobs by the files that they read, and would run a job again with each file that it reads. Its
    `priority` orders only jobs for which there is no room at once; `ancient` inputs hide changed params of the job that
    has them (DAG.update_needrun).
    """
    dag = workflow.dag
    ready, finish = dag._ready, dag.finish
    held: set[Any] = set()

    def is_ready(job: Any) -> bool:
        if not ready(job):
            return False
        if any(dag.needrun(each) and not dag.finished(each) for each in first(job)):
            held.add(job)
            return False
        return True

    async def finish_and_release(job: Any, update_checkpoint_dependencies: bool = True) -> Any:
        more = await finish(job, update_checkpoint_dependencies)
        released = [each for each in held if dag.needrun(each)]
        held.clear()
        return dag.update_ready(released) or more

    dag._ready, dag.finish = is_ready, finish_and_release


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


@patch("snakemake")
def submit_local_rules(workflow: Any, names: Iterable[str]) -> None:
    """Submit the jobs of rules with `localrule: True` to the cluster, before planning, when it is known whether they
    are for the login node. Snakemake asks for that when it reads the rules."""
    workflow._localrules.difference_update(names)


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
def run_with_until(workflow: Any, rule: str) -> None:
    """Add a rule to those of `--until` before planning, which Snakemake allows only on its command line."""
    dag = workflow.dag
    if dag.untilrules or dag.untilfiles:
        dag.untilrules.add(rule)


@patch("snakemake")
def run_with_targets(workflow: Any, rule: str) -> None:
    """Add a rule to the targets before planning, which Snakemake takes from its command line or the default alone."""
    workflow.dag.targetrules.add(workflow.get_rule(rule))


@patch("snakemake", upstream="snakemake#3690", features=("snakemake.persistence:ParamsChange",))
def decide_by_receipts(
    workflow: Any,
    receipt_of: Callable[[Any], Any],
    params_of: Callable[[Any], dict[str, str]],
    sha256_of: Callable[[str], str | None],
) -> None:
    """Make Snakemake decide by receipts which jobs to run, and by nothing else: not by dates, which a copy or a
    checkout changes, and not by its own metadata, which no other engine writes and no clone has.

    A receipt has the params and the inputs of a job's last run; `receipt_of` returns None without one, and the job
    runs. `params_of` returns the params of today.
    """
    from snakemake.io import _IOFile
    from snakemake.persistence import NO_PARAMS_CHANGE, ParamsChange
    from snakemake.settings.types import RerunTrigger

    persistence = workflow.persistence

    def params_changed(job: Any, file: Any = None) -> Any:
        if not job.output:
            return NO_PARAMS_CHANGE
        receipt, now = receipt_of(job), params_of(job)
        known = receipt.params if receipt else {}
        if receipt and known == now:
            return NO_PARAMS_CHANGE
        names = [name for name in sorted({*known, *now}) if known.get(name) != now.get(name)]
        return ParamsChange(
            only_old={f"{name}: {known[name]}" for name in names if name in known},
            only_new={f"{name}: {now[name]}" for name in names if name in now} or {"no receipt"},
            files=set(job.output),
        )

    def input_changed(job: Any, file: Any = None) -> Any:
        receipt = receipt_of(job) if job.output else None
        now = {str(path) for path in job.input if not path.is_ancient}
        return list(job.output) if receipt and receipt.inputs.keys() != now else []

    def input_checksums(job: Any, path: Any) -> set[str | None]:
        receipt = receipt_of(job)
        digest = receipt.inputs.get(str(path)) if receipt else None
        return {f"sha256:{digest}" if digest else None}

    persistence.has_metadata = lambda job: True
    persistence.has_outdated_metadata = lambda job: False
    persistence.params_changed = params_changed
    persistence.input_changed = input_changed
    persistence.input_checksums = input_checksums
    persistence.code_changed = persistence.software_stack_changed = lambda job, file=None: []
    workflow.dag_settings.rerun_triggers = RerunTrigger.all()  # --rerun-triggers would leave receipts out

    async def is_newer(file: Any, time: float) -> bool:
        return not file.is_ancient  # so its content is compared

    async def is_checksum_eligible(file: Any, threshold: int) -> bool:
        return bool(await file.exists_local())

    async def checksum(file: Any, threshold: Any = None, force: bool = False, algorithm: Any = None) -> str | None:
        digest = sha256_of(str(file))
        return f"sha256:{digest}" if digest else None

    _IOFile.is_newer = is_newer
    _IOFile.is_checksum_eligible = is_checksum_eligible
    _IOFile.checksum = checksum


@patch("snakemake")
def count_as_present(workflow: Any, paths: Iterable[str]) -> None:
    """Make a dry run plan as if these files were there: a run would restore them from DVC's cache before it plans."""
    from snakemake.io import _IOFile
    from snakemake_interface_storage_plugins.io import Mtime

    present, exists_local, mtime_uncached = set(paths), _IOFile.exists_local, _IOFile.mtime_uncached

    def is_present(file: Any) -> bool:
        return str(file) in present and file.rule is not None and file.rule.workflow is workflow

    async def exists(file: Any) -> bool:
        return is_present(file) or bool(await exists_local(file))

    async def mtime(file: Any, skip_storage: bool = False) -> Any:
        return Mtime(local=1.0) if is_present(file) else await mtime_uncached(file, skip_storage)

    _IOFile.exists_local, _IOFile.mtime_uncached = exists, mtime
