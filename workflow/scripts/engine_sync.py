"""Keep Snakemake and DVC in agreement about which stages are up to date and which outputs are intact.

Snakemake decides by its own metadata (`.snakemake/`), DVC by the hashes in `dvc.lock`. `before_planning` runs before
Snakemake plans its jobs: it stops if an output is damaged, restores missing ones from DVC's cache, and marks as done
in Snakemake what DVC has restored (`dvc pull`, `dvc checkout`, the run cache). `commit_dvc_state` runs after a
successful run and records its outputs in DVC. Neither runs a stage.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import interrupts
import outputs
import run_lock
import yaml
from dvc_state import (
    LOCK,
    DvcStages,
    changed_in_cache,
    locked_stages,
    record,
    remove,
    remove_broken_rwlock,
    repository,
    write_cache_list,
)
from snakemake.exceptions import WorkflowError

from zerolora.compat.snakemake_patches import (
    after_each_job,
    before_each_job,
    count_as_done,
    run_again,
    run_with_targets,
    run_with_until,
    without_metadata,
)
from zerolora.config.file import NOTHING, with_overrides
from zerolora.config.grids import Shared
from zerolora.config.resolve import PLANNED, digest
from zerolora.config.runs_file import is_current, write_runs
from zerolora.config.schema import Config
from zerolora.errors import UserError
from zerolora.files import sha256
from zerolora.units import counted

if TYPE_CHECKING:
    from jobs import Jobs

PIPELINE = Path("dvc.yaml")
# The hash of the dvc.lock that Snakemake's metadata was last synchronised with.
AGREED = Path(".snakemake/agreed-dvc-lock.sha256")
# The files of DVC's cache that held the outputs then.
AGREED_CACHE = Path(".snakemake/agreed-dvc-cache.txt")
# Sizes and dates of the source files at that time.
AGREED_SOURCES = Path(".snakemake/agreed-sources.sha256")
SOURCES = (Path("src/zerolora"), Path("workflow/rules"))  # of the stage resolve in dvc.yaml
CONFIG_FILE = Path("config/config.yaml")
RESOLVED = Path("results/config.json")
UNFINISHED = Path("work/compare")  # of neither engine
IMPORTING = "ZEROLORA_IMPORTING_DVC_STATE"  # set for the Snakemake that import_dvc_state starts
SKEW = 10  # seconds that another machine's clock may be ahead
SITE_CACHE = Path(".cache/dvc")  # as .dvc/config has it
DVC_LOCAL_CONFIG = Path(".dvc/config.local")
# Files that a config can name: USER_CONFIG, PROBE, USER_TEMPLATE, USER_TASK, USER_TASK_JSON and HARNESS_FILES in
# config/values.py.
USER_FILES = (
    *("config/deepspeed/*.json", "config/hardware/*.json", "config/templates/*.jinja"),
    *("config/tasks/*.py", "config/tasks/*.json", "config/harness/**/*", "config/searches/*.json"),
    "config/experiments/*.yaml",
)
# Those that name targets, and one that runs by request, with two wildcards, which DVC does not know.
TARGET_RULES = ("all", "default", "judge_all", "export", "export_target")
Stamp = tuple[int, int]  # size and time of a file


@dataclass
class _Read:
    """What this run has read of the files that a user edits, and its jobs of their inputs."""

    values: dict[str, Any] = field(default_factory=dict)
    overridden: bool = False
    """Whether the run has values besides those of the config file."""
    files: dict[str, Stamp | None] = field(default_factory=dict)
    """Of the stage resolve, but for the config."""
    inputs: dict[str, dict[str, Stamp | None]] = field(default_factory=dict)
    """By stage, as its job began."""
    meanwhile: dict[str, str] = field(default_factory=dict)
    """By stage, an input that has changed while its job ran."""


_read = _Read()


def user_files() -> list[str]:
    """Return the user's files that a config can name: DeepSpeed configs, measured hardware, prompt formats, evaluation
    tasks, experiments, and the trials of searches."""
    return sorted(str(path) for pattern in USER_FILES for path in Path().glob(pattern) if path.is_file())


def before_planning(workflow: Any, jobs: "Jobs", every_output: Sequence[str]) -> None:
    """Bring files, DVC and Snakemake into line before Snakemake plans its jobs.

    Takes the run lock, writes the runs for DVC, stops if an output is damaged, restores missing outputs from DVC's
    cache, marks as done what DVC knows to be up to date, and has Snakemake run again what was begun and not ended, and
    what nobody knows to be right, of `every_output` of the workflow. Inside `dvc repro` DVC has done all but the first.
    A dry run takes no lock, restores and deletes nothing, and writes no record, only caches of what was hashed: what
    DVC knows to be up to date, it leaves out of its plan.

    With overrides of the config, DVC's record is left alone, before and after.

    Raises WorkflowError if another run has the lock, an output is damaged, or an output or one of `read_files` is dated
    in the future: Snakemake would run a job, see that its outputs are older than that file, and delete them.
    """
    executing = workflow.execution_settings is not None and not workflow.dryrun
    config = jobs.config
    _read.values, _read.overridden = jobs.values, bool(jobs.over.parts)
    _plan_resolve(workflow)
    if executing:
        interrupts.calm()
        before_each_job(workflow, functools.partial(_begin_job, workflow, jobs.texts))
        after_each_job(workflow, functools.partial(_record_job, workflow))
        _read.files = {path: _stamp(path) for path in _files_of_resolve()}
    if IMPORTING in os.environ:
        return
    has_pipeline = PIPELINE.is_file()
    if executing and not has_pipeline and not _read.overridden:
        print(f"there is no {PIPELINE} here: DVC records nothing of this run", file=sys.stderr)
    if executing and workflow.execution_settings.lock:
        try:
            run_lock.acquire(workflow.snakemake_tmp_dir)
        except run_lock.Taken as taken:
            raise WorkflowError(str(taken)) from None
    elif not run_lock.is_free():
        return
    if executing:
        _check_dates([*jobs.read_files(), *every_output])
    if executing and Path(".dvc").is_dir():
        make_site_cache_private()  # inside `dvc repro` too, after which a copied project has no path of the original
    if executing and has_pipeline and not _read.overridden and "DVC_STAGE" not in os.environ:
        write_runs(config)
    if "DVC_STAGE" in os.environ:
        return
    unknown = _unknown(workflow, every_output)
    # What DVC would say of edited runs is not known before a run that is not a dry run.
    if _has_dvc() and is_current(config):
        if executing:
            remove_broken_rwlock()
        unknown = _synchronise(workflow, config, executing, every_output, unknown)
        # Snakemake made it on starting, and the one that marked jobs as done has removed it on ending.
        run_lock.SNAKEMAKE_LOCKS.mkdir(exist_ok=True)
    _run_unknown_again(workflow, unknown)


def _plan_resolve(workflow: Any) -> None:
    """Have Snakemake plan `resolve` with other targets: it writes parameters of the stages in DVC, which records none
    without them."""
    run_with_until(workflow, "resolve")
    if _has_dvc() and not _read.overridden and workflow.execution_settings is not None:
        run_with_targets(workflow, "resolve")


def after_planning(workflow: Any) -> None:
    """Record in DVC what is there if no job is to run and dvc.lock is missing, or not what the last run wrote."""
    executing = workflow.execution_settings is not None and not workflow.dryrun
    inside = {"DVC_STAGE", IMPORTING} & os.environ.keys()
    if executing and not inside and not _agreed() and not any(workflow.dag.needrun_jobs()):
        commit_dvc_state(workflow)


def _check_dates(paths: Iterable[str]) -> None:
    """Wait for the date of a file that lies up to SKEW seconds ahead, as on a server with another clock. Raises
    WorkflowError if one lies further ahead."""
    now = time.time()
    latest, path = 0.0, ""
    for each in paths:
        with contextlib.suppress(OSError):
            latest, path = max((latest, path), (Path(each).stat().st_mtime, each))
    if latest > now + SKEW:
        try:
            date = datetime.datetime.fromtimestamp(latest).isoformat(" ", "seconds")
        except (ValueError, OverflowError, OSError):
            date = f"{latest:.0f} s after 1970"
        raise WorkflowError(
            f"{path}: is dated in the future ({date}), so all that is made of it would look older; correct the clock, "
            f"or `touch {path}`"
        )
    time.sleep(max(0.0, latest - now))


def make_site_cache_private() -> None:
    """Give DVC's cache of hashes a directory that only this user can enter, and tell DVC its absolute path.

    DVC keeps pickles there, by default in /var/tmp/dvc, in directories that everyone can write (CVE-2025-69872).
    The path in .dvc/config is relative and holds for commands in the project's root; the one in .dvc/config.local holds
    in its subdirectories too.
    """
    SITE_CACHE.mkdir(parents=True, exist_ok=True)
    if SITE_CACHE.stat().st_mode & 0o077:
        SITE_CACHE.chmod(0o700)
    entry = f"    site_cache_dir = {SITE_CACHE.absolute()}\n"
    text = DVC_LOCAL_CONFIG.read_text(encoding="utf-8") if DVC_LOCAL_CONFIG.exists() else ""
    if entry in text:
        return
    text = re.sub(r"^\s*site_cache_dir\s*=.*\n", "", text, flags=re.MULTILINE)
    core = re.compile(r"^\[core\]\n", re.MULTILINE)
    text = core.sub(lambda match: match[0] + entry, text, count=1) if core.search(text) else f"[core]\n{entry}{text}"
    DVC_LOCAL_CONFIG.write_text(text, encoding="utf-8")


def commit_dvc_state(workflow: Any) -> None:
    """Record the outputs of a workflow that ended well in DVC.

    Only stages of this DAG count: they are up to date, which nobody knows of other results that lie around. Of these,
    only those are recorded whose files are, byte for byte, what their job wrote.
    """
    if "DVC_STAGE" in os.environ:
        _check_before_dvc_records()
    if not _has_dvc() or _read.overridden or workflow.touch:
        return
    from dvc.exceptions import DvcException

    if not _is_config_as_read():  # dvc.yaml has paths of it, and so would the record
        _say_unrecorded([f"{CONFIG_FILE} was edited during the run"])
        return
    logging.getLogger("dvc").setLevel(logging.ERROR)  # it tells of each entry of dvc.lock that it updates
    names = {_stage_of(job) for job in workflow.dag.jobs if job.rule.name not in TARGET_RULES}
    try:
        with repository() as repo, locked_stages(repo) as known:
            changed = [name for name in sorted(names & known.keys()) if known[name].status()]
            edited = _edited(workflow, changed)
            intact = [name for name in changed if name not in edited and _is_as_written(name)]
            record([known[name] for name in intact])
            for name in intact:
                outputs.restat(name)
            write_cache_list(known.values(), AGREED_CACHE)
    except DvcException as error:
        print(f"not recorded in DVC: {error}; run `dvc commit` when that is fixed", file=sys.stderr)
        return
    _say_unrecorded(edited.values())
    if not edited:
        _agree()


def _say_unrecorded(reasons: Iterable[str]) -> None:
    for reason in reasons:
        print(f"not recorded in DVC: {reason}; run the same command again", file=sys.stderr)


def compare_what_is_there(workflow: Any, config: Config) -> None:
    """Write a table of all runs, with the reasons of those that failed, outside the outputs of both engines.

    The stage compare is not made while a run is unfinished. What an earlier config left of a run whose jobs were still
    to come is not shown as its result.
    """
    from zerolora.report.comparison import compare_all

    if not RESOLVED.is_file():
        return
    waiting = [job for job in workflow.dag.needrun_jobs() if not workflow.dag.finished(job)]
    outdated = {run: str(job.rule.name) for job in reversed(waiting) for run in _runs_of(job, config)}
    try:
        print(f"zerolora: {compare_all(RESOLVED.parent, UNFINISHED, outdated)}", file=sys.stderr)
    except (UserError, OSError) as error:
        print(f"zerolora: no table of what is there: {error}", file=sys.stderr)


def _runs_of(job: Any, config: Config) -> list[str]:
    """Return the runs that a job is for: one, or those that share its result; none if it is for no run."""
    wildcards = job.wildcards_dict
    if "run" in wildcards:
        return [str(wildcards["run"])]
    kind = next((kind for kind in Shared._fields if kind in wildcards), None)
    return [run for run in config.all_runs if kind and getattr(config.shared_by(run), kind) == wildcards[kind]]


def _is_as_written(stage: str) -> bool:
    """Tell whether the outputs of a stage are what its job wrote; say so on standard error if not."""
    result = outputs.check(stage)
    if not result and stage in outputs.recorded():
        return True
    paths = [path for kind in vars(result).values() for path in kind.get(stage, [])]
    print(f"not recorded in DVC: {', '.join(paths) or stage} is not what {stage} wrote", file=sys.stderr)
    return False


def _edited(workflow: Any, stages: Iterable[str]) -> dict[str, str]:
    """Return those of these stages that were not made of what DVC would now record as their source, with the reason.

    DVC hashes what a stage reads when it records the stage, which may be long after its job has read it.
    """
    jobs = {_stage_of(job): job for job in workflow.dag.jobs if job.rule.name not in TARGET_RULES}
    hashes = outputs.hashes()
    result = {stage: _edited_input(workflow, stage, jobs[stage], hashes) for stage in stages}
    if "resolve" in result:
        result["resolve"] = _edited_file() or result["resolve"]
    return {stage: reason for stage, reason in result.items() if reason}


def _check_before_dvc_records() -> None:
    """End this process, a job of `dvc repro`, with an error if what its stage read has been edited meanwhile: DVC would
    take the edited files for what the stage was made of."""
    reason = next((f"{path} has changed while {stage} read it" for stage, path in _read.meanwhile.items()), "")
    if os.environ["DVC_STAGE"] == "resolve":
        reason = _edited_file() if _is_config_as_read() else f"{CONFIG_FILE} was edited during the run"
    if reason:
        print(f"{reason}; run `dvc repro` again", file=sys.stderr)
        sys.exit(1)


def _is_config_as_read() -> bool:
    try:
        return with_overrides(CONFIG_FILE, NOTHING).values == _read.values
    except UserError:
        return False


def _edited_file() -> str:
    """Say which of the files that resolve reads beside the config is not what this run read; empty if each is."""
    paths = sorted({*_read.files, *_files_of_resolve()})
    edited = [path for path in paths if _stamp(path) != _read.files.get(path)]
    others = f" and {counted(len(edited) - 1, 'other')}" if len(edited) > 1 else ""
    return f"{edited[0]}{others} was edited during the run" if edited else ""


def _edited_input(workflow: Any, stage: str, job: Any, hashes: dict[str, tuple[Stamp, str]]) -> str:
    """Say which input is not what the last job of a stage read; empty if each is. `hashes` are those of files that
    stages wrote, with the stamps that they had then."""
    if stage in _read.meanwhile:
        return f"{_read.meanwhile[stage]} has changed while {stage} read it"
    began = _read.inputs.get(stage, {})
    for path in map(str, job.input):
        now = _stamp(path)
        if now and now == began.get(path):
            continue
        known = workflow.persistence.input_checksums(job, path) - {None}
        if not known:  # of a file that is larger than the profile has Snakemake hash; it has decided by time
            continue
        then, digest = hashes.get(path, (None, ""))
        if now is None or f"sha256:{digest if now == then else sha256(Path(path))}" not in known:
            return f"{path} has changed since {stage} read it"
    return ""


def _files_of_resolve() -> list[str]:
    """Return the files that the stage resolve reads beside the config."""
    return [*user_files(), *map(str, _source_files())]


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116 (hundreds of them, at each start)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def begin_run() -> None:
    """Forget the agreement when jobs begin to run: until they end well, Snakemake's metadata may be ahead of DVC's."""
    if IMPORTING not in os.environ:
        AGREED.unlink(missing_ok=True)


def _begin_job(workflow: Any, planned: Callable[[], tuple[str, dict[str, str]]], job: Any) -> None:
    """Record that a job starts, and what it reads. With `--touch` none does."""
    if job.rule.name not in TARGET_RULES and not workflow.touch:
        if not _read.inputs:
            os.environ[PLANNED] = digest(*planned())  # for jobs that read the config again
        outputs.begin(_stage_of(job), [str(path) for path in job.output])
        _read.inputs[_stage_of(job)] = {str(path): _stamp(str(path)) for path in job.input}


def _unknown(workflow: Any, every_output: Sequence[str]) -> list[str]:
    """Return the outputs that are there although no job is known, to the record or to Snakemake, that wrote them."""
    declared = outputs.declared()
    there = [path for path in every_output if path in declared or Path(path).exists()]
    lacking = {path for path in there if path not in declared}
    return sorted(lacking | {path for path in without_metadata(workflow, there) if Path(path).exists()})


def _run_unknown_again(workflow: Any, unknown: list[str]) -> None:
    """Have Snakemake run again what was begun and did not end well, and what nobody knows to be right."""
    begun = {path: stage for stage, paths in outputs.begun().items() for path in paths}
    unknown = [path for path in unknown if path not in begun]
    if unknown:
        others = f" and {counted(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
        print(f"{unknown[0]}{others}: no record says which job wrote it; it is made again", file=sys.stderr)
    run_again(workflow, [*begun, *unknown])


def _record_job(workflow: Any, job: Any) -> None:
    """Record what a job wrote. After `--touch` that is known only if DVC has said that the files are right.

    What an input was at the job's start is not known if it has changed meanwhile: without a record the job runs again.
    """
    if job.rule.name in TARGET_RULES or (workflow.touch and IMPORTING not in os.environ):
        return
    stage = _stage_of(job)
    changed = [path for path, stamp in _read.inputs.get(stage, {}).items() if stamp not in (None, _stamp(path))]
    if changed:
        _read.meanwhile[stage] = changed[0]
    else:
        outputs.record(stage, [str(path) for path in job.output])


def _synchronise(
    workflow: Any, config: Config, executing: bool, every_output: Sequence[str], unknown: list[str]
) -> list[str]:
    """Compare the outputs with their record; where that or dvc.lock has changed, or one has no record, ask DVC. Return
    those that are still unknown."""
    settings = workflow.dag_settings
    result = _without_forced(outputs.check(), settings)
    comments = LOCK.exists() and "resolve" not in result.stages and _commit_comments(config, executing)
    lost, dvc = changed_in_cache(AGREED_CACHE), None
    if LOCK.exists() and (result or lost or not _agreed() or unknown):
        from dvc.exceptions import DvcException

        try:
            with repository() as repo:
                dvc = DvcStages(repo, executing)
                if comments:
                    dvc.take_for_clean("resolve")
                _fill_cache(dvc, (lost | dvc.lost()) - result.stages, executing)
                up_to_date = _settle(dvc, result, settings, executing)
                if executing:
                    dvc.write_cache_list(AGREED_CACHE)
        except DvcException as error:
            _check_dvc_lock()
            if not (result.changed or result.added):  # which may be why
                print(f"not taken over from DVC: {error}", file=sys.stderr)
        else:
            targets = [*up_to_date.values()]
            if not executing:
                count_as_done(workflow, targets)
                if targets:
                    print(
                        f"up to date in DVC: {counted(len(targets), 'stage')}; a run takes them over", file=sys.stderr
                    )
                return [path for path in unknown if not any(dvc.output_of(stage, path) for stage in up_to_date)]
            # after_planning, or the run's end, records them.
            lacking = (outputs.recorded() & dvc.names) - up_to_date.keys()
            taken_over = not targets or import_dvc_state(str(workflow.main_snakefile), targets)
            if lacking:
                AGREED.unlink(missing_ok=True)
            elif taken_over:
                _agree()
            return _unknown(workflow, every_output)
    if result.changed or result.added:
        raise _damage_error(result, dvc)
    if executing:
        _run_again(result.missing)
    return unknown


def _check_dvc_lock() -> None:
    """Raise WorkflowError if dvc.lock is damaged: what is recorded there is lost, and nothing more could be."""
    text = _text(LOCK)
    try:
        whole = isinstance(yaml.safe_load(text), dict)
    except (ValueError, yaml.YAMLError):
        whole = False
    if not whole and re.search(r"^<<<<<<< ", text, re.MULTILINE):
        raise WorkflowError(
            f"{LOCK}: has the conflict markers of a merge; `git checkout --ours {LOCK}` takes your side's, "
            f"`git checkout --theirs {LOCK}` the other's"
        )
    if not whole:
        raise WorkflowError(f"{LOCK}: is not what DVC wrote; `git checkout {LOCK}` restores it, or delete it")


def _fill_cache(dvc: DvcStages, lost: set[str], executing: bool) -> None:
    """Put intact outputs into DVC's cache again that it has lost: a push would lack them."""
    lost &= outputs.recorded()
    if not executing:
        if lost:
            print(f"DVC's cache lacks outputs of {', '.join(sorted(lost))}; a run records them again", file=sys.stderr)
        return
    filled = dvc.fill_cache(sorted(lost))
    if filled:
        others = f" and {counted(len(filled) - 1, 'other')}" if len(filled) > 1 else ""
        print(f"{filled[0]}{others}: DVC's cache had lost it, and has it again", file=sys.stderr)


def _commit_comments(config: Config, executing: bool) -> bool:
    """Record in DVC edits of the source that leave every code fingerprint as it was: comments, docstrings, layout.
    Return whether a dry run leaves such a change unrecorded.

    DVC compares the files of the stage resolve, Snakemake the fingerprints, so only DVC takes these for a change.
    """
    if _text(AGREED_SOURCES) == _stamp_of_sources():
        return False
    from zerolora.config.code import codes
    from zerolora.config.resolve import resolve

    try:
        known = json.loads(RESOLVED.read_text(encoding="utf-8"))["code"]
    except (OSError, ValueError, KeyError):
        return False
    if known != codes(resolve(config)).named:
        return False
    from dvc.exceptions import DvcException

    agreed = _agreed()
    try:
        with repository() as repo:
            changes = repo.status(["resolve"]).get("resolve", [])
            comments = bool(changes) and all(
                isinstance(change, dict) and set(change.get("changed deps", {None})) <= {str(path) for path in SOURCES}
                for change in changes
            )
            if not executing:
                return comments
            if comments:
                repo.commit("resolve", force=True)
    except DvcException as error:
        print(f"the edited source files are not recorded in DVC: {error}", file=sys.stderr)
        return False
    if agreed:
        _agree()
    else:
        AGREED_SOURCES.parent.mkdir(exist_ok=True)
        AGREED_SOURCES.write_text(_stamp_of_sources(), encoding="utf-8")
    return False


def _stamp_of_sources() -> str:
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in _source_files()]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _source_files() -> list[Path]:
    return sorted(
        path for folder in SOURCES for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )


def _settle(dvc: DvcStages, found: outputs.Findings, settings: Any, executing: bool) -> dict[str, str]:
    """Restore what is missing; return the stages that are up to date for DVC, with Snakemake's targets of them.

    Raises WorkflowError if an output is neither what its job wrote nor what dvc.lock has.
    """
    restored = dvc.restore(found.missing, found.changed.keys() | found.added.keys()) if executing else {}
    if restored:
        found = _without_forced(outputs.check(), settings)
    damaged, up_to_date = dvc.damaged(), dvc.up_to_date()
    for stage in found.stages - dvc.names:
        if executing:
            outputs.forget(stage)
        found.drop(stage)
    known = outputs.recorded() | outputs.begun().keys()
    unknown = {stage: paths for stage, paths in damaged.items() if stage not in known}
    for stage in found.changed.keys() | found.added.keys():
        if stage in dvc.recorded and stage not in damaged:
            found.drop(stage)  # it came from DVC
            if stage not in up_to_date and executing:
                # With other settings than those that Snakemake has noted.
                outputs.remove_declared(stage)
    found.changed |= _without_forced(outputs.Findings(changed=unknown), settings).changed
    for stage in restored.keys() - up_to_date.keys():
        # Of other settings than today's: its job runs anyway, and Snakemake may know nothing of these files.
        remove(restored.pop(stage))
    if found.changed or found.added:
        raise _damage_error(found, dvc)
    if restored:
        paths = [path for paths in restored.values() for path in paths]
        listed = ", ".join(paths) if len(paths) <= 4 else f"{len(paths)} outputs of {counted(len(restored), 'stage')}"
        print(f"restored from DVC's cache: {listed}", file=sys.stderr)
    if executing:
        _run_again(found.missing)
    return up_to_date


def _run_again(missing: dict[str, list[str]]) -> None:
    """Delete what else the stages with missing files declare, so that Snakemake runs them."""
    for stage, paths in missing.items():
        print(f"{paths[0]} is missing and not in DVC's cache: {stage} runs again", file=sys.stderr)
        outputs.remove_declared(stage)


def _without_forced(found: outputs.Findings, settings: Any) -> outputs.Findings:
    """Drop the stages that the user has told Snakemake to run whatever their outputs are (--forcerun, --forceall)."""
    for stage in found.stages:
        if settings.forceall or stage.partition("@")[0] in settings.forcerun:
            found.drop(stage)
    return found


def _damage_error(found: outputs.Findings, dvc: DvcStages | None) -> WorkflowError:
    """Return an error with one line for each damaged file: what it is, and how to get it back."""
    lines = []
    for stage, paths in found.changed.items():
        for path in paths:
            output = dvc and dvc.output_of(stage, path)
            if dvc and output and dvc.is_cached(stage, output):
                way = f"`dvc checkout --force {output}` restores it"
            else:
                way = f"delete it, and {stage} runs again"
            lines.append(f"{path}: is not what {stage} wrote; {way}")
    for stage, paths in found.added.items():
        lines += [f"{path}: {stage} did not write it; move it out of {Path(path).parent}" for path in paths]
    return WorkflowError("\n".join(lines))


def import_dvc_state(snakefile: str, targets: list[str]) -> bool:
    """Have Snakemake mark the jobs of these targets of a workflow as done. Return whether it could."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", snakefile, "--touch", "--forceall", "--cores", "1"]
    result = subprocess.run(
        [*command, "--quiet", "all", "--", *targets],
        env={name: value for name, value in os.environ.items() if name != "SNAKEMAKE_PROFILE"} | {IMPORTING: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        # Quiet, Snakemake may name no reason, as for outputs that a killed job had begun.
        lines = (result.stderr or result.stdout).strip().splitlines()
        why = lines[-1] if lines else "Snakemake did not mark all outputs as done, so their jobs run again"
        print(f"not taken over from DVC: {why}", file=sys.stderr)
    return result.returncode == 0


def _has_dvc() -> bool:
    """Return whether DVC records this project, and this Snakemake does not run inside `dvc repro` or
    `import_dvc_state`."""
    outside = "DVC_STAGE" not in os.environ and IMPORTING not in os.environ
    return outside and Path(".dvc").is_dir() and PIPELINE.is_file()


def _stage_of(job: Any) -> str:
    """Return the DVC stage of a Snakemake job, as in train@default."""
    names = "-".join(job.wildcards_dict.values())
    return f"{job.rule.name}@{names}" if names else str(job.rule.name)


def _agreed() -> bool:
    whole = all(file.is_file() for file in (outputs.RECORD, AGREED, LOCK))
    return whole and _text(AGREED) == _digest()


def _agree() -> None:
    AGREED.parent.mkdir(exist_ok=True)
    AGREED.write_text(_digest(), encoding="utf-8")
    AGREED_SOURCES.write_text(_stamp_of_sources(), encoding="utf-8")


def _text(path: Path) -> str:
    """Return the text of a file, whatever its bytes are; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _digest() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()
