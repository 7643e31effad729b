"""Keep Snakemake and DVC in agreement about which stages are up to date and which outputs are intact.

Both go by the receipts of the stages (receipts.py). `before_planning` runs before Snakemake plans its jobs: it stops
if an output is damaged, restores what is missing from DVC's cache, and has Snakemake decide by receipts. Each job that
ends well writes its receipt. `commit_dvc_state` runs after a successful run and records its outputs in DVC. Neither
runs a stage.
"""

import contextlib
import datetime
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dvc_state
import interrupts
import run_lock
from dvc_state import CachedStages, LockSummary, lock_fault, record, remove_broken_rwlock, repository, write_summary
from keep import RUNS, inputs_of, keep, params_of
from receipts import Findings, Receipt, Receipts, Stamp, path_of, stamp
from snakemake.exceptions import WorkflowError

from zerolora.compat.snakemake_patches import (
    after_each_job,
    before_each_job,
    count_as_present,
    decide_by_receipts,
    run_with_targets,
    run_with_until,
    start_after,
)
from zerolora.config.file import NOTHING, with_overrides
from zerolora.config.grids import Shared
from zerolora.config.resolve import PLANNED, digest
from zerolora.config.runs_file import is_current, write_runs
from zerolora.config.schema import Config
from zerolora.errors import UserError
from zerolora.files import cache_folder
from zerolora.log import forget
from zerolora.units import counted

if TYPE_CHECKING:
    from jobs import Jobs, PlannedJob

CONFIG_FILE = Path("config/config.yaml")
RESOLVED = Path("results/config.json")
UNFINISHED = Path("work/compare")  # of neither engine
SKEW = 10  # seconds that another machine's clock may be ahead
SITE_CACHE, SITE_CACHE_VARIABLE = "dvc", "DVC_SITE_CACHE_DIR"
DVC_LOCAL_CONFIG = Path(".dvc/config.local")
MODELS_ALONE = ("evaluate_base", "task_base", "reference", "teacher")
"""Stages that load a base model, and read nothing of `render`."""
# Those that name targets.
TARGET_RULES = ("all", "default", "judge_all", "export")


class EngineSync:
    """Synchronizes the engines around one run of Snakemake."""

    def __init__(self, workflow: Any, jobs: "Jobs", planned: Mapping[str, "PlannedJob"]) -> None:
        """`planned` has the jobs of `all` by stage, as in train@default."""
        self._workflow, self._jobs, self._planned = workflow, jobs, planned
        self._receipts = Receipts(jobs.hashes)
        self._overridden = bool(jobs.over.parts)
        """Whether the run has values besides those of the config file."""
        self._inputs_at_start: dict[str, dict[str, Stamp | None]] = {}
        """Stamps of a job's inputs as it began, by stage."""
        self._meanwhile: dict[str, str] = {}
        """By stage, an input that has changed while its job ran."""

    def before_planning(self) -> None:
        """Bring files, DVC and Snakemake into line before Snakemake plans its jobs.

        Takes the run lock, writes the runs for DVC, stops if an output is damaged, restores missing outputs from DVC's
        cache, and has Snakemake decide by receipts which jobs to run. Inside `dvc repro` DVC has restored what it
        could. A dry run takes no lock and writes nothing but caches: it counts what a run would restore as present.

        With overrides of the config, DVC's record is left alone, before and after.

        Raises WorkflowError if another run has the lock, an output or dvc.lock is damaged, or an output or one of
        `read_files` is dated in the future: Snakemake would run a job, see that its outputs are older than that file,
        and delete them.
        """
        executing = self._workflow.execution_settings is not None and not self._workflow.dryrun
        self._plan_resolve()
        decide_by_receipts(self._workflow, self._receipt_of, params_of, self._receipts.hashes.of)
        if executing:
            interrupts.calm()
            before_each_job(self._workflow, self._begin_job)
            after_each_job(self._workflow, self._end_job)
            start_after(self._workflow, self._waits_for_render)
        if executing and not dvc_state.PIPELINE.is_file() and not self._overridden:
            print(f"there is no {dvc_state.PIPELINE} here: DVC records nothing of this run", file=sys.stderr)
        if executing and self._workflow.execution_settings.lock:
            try:
                run_lock.acquire(self._workflow.snakemake_tmp_dir)
            except run_lock.Taken as taken:
                raise WorkflowError(str(taken)) from None
        elif not run_lock.is_free():
            return
        if executing:
            _check_dates([*self._jobs.read_files(), *(path for job in self._planned.values() for path in job.outputs)])
        if executing and Path(".dvc").is_dir():
            # Inside `dvc repro` too, after which a copy of another user's project has no path of theirs.
            make_site_cache_private()
        if executing and dvc_state.PIPELINE.is_file() and not self._overridden and "DVC_STAGE" not in os.environ:
            write_runs(self._jobs.config)
        if "DVC_STAGE" not in os.environ:
            self._settle(executing)
            self._receipts.hashes.save()

    def after_planning(self) -> None:
        """Record in DVC what is there if no job is to run and dvc.lock lacks something of it. For `zerolora keep`, only
        keep results."""
        if RUNS in os.environ:
            jobs = {stage_of(job): job for job in self._workflow.dag.jobs}
            keep(jobs, self._planned, self._receipts)
            return
        executing = self._workflow.execution_settings is not None and not self._workflow.dryrun
        if executing and "DVC_STAGE" not in os.environ and not any(self._workflow.dag.needrun_jobs()):
            self.commit_dvc_state()

    def commit_dvc_state(self) -> None:
        """Record the outputs of a workflow that ended well in DVC.

        Only stages of this DAG count, and of these only those whose receipt still holds: whose inputs, settings and
        outputs are what they were as the job ran. DVC hashes them now, which may be long after.
        """
        if "DVC_STAGE" in os.environ:
            self._check_before_dvc_records()
        if not self._has_dvc() or self._workflow.touch:
            return
        from dvc.exceptions import DvcException

        if not self._is_config_as_read():  # dvc.yaml has paths of it, and so would the record
            _say_unrecorded([f"{CONFIG_FILE} was edited during the run"])
            return
        jobs = {stage_of(job): job for job in self._workflow.dag.jobs if job.rule.name not in TARGET_RULES}
        summary = LockSummary()
        names = [name for name in jobs if not (summary.is_current and summary.is_recorded(name))]
        if not names:
            return
        logging.getLogger("dvc").setLevel(logging.ERROR)  # it tells of each entry of dvc.lock that it updates
        reasons = {name: self._why_unrecorded(name, jobs[name]) for name in names}
        try:
            with repository() as repo:
                self._record(repo, [name for name in names if reasons[name] is None], summary)
        except DvcException as error:
            print(f"not recorded in DVC: {lock_fault() or error}; run `dvc commit` when that is fixed", file=sys.stderr)
            return
        self._receipts.hashes.save()
        _say_unrecorded(reason for reason in reasons.values() if reason)

    def _plan_resolve(self) -> None:
        """Have Snakemake plan `resolve` with other targets: it writes parameters of the stages in DVC, which records
        none without them."""
        run_with_until(self._workflow, "resolve")
        if self._has_dvc() and self._workflow.execution_settings is not None:
            run_with_targets(self._workflow, "resolve")

    def _settle(self, executing: bool) -> None:
        """Stop if an output is damaged, and restore from DVC's cache what is not as today's config asks for it."""
        known, planned = self._receipts, self._planned
        found = _without_forced(known.check(planned), self._workflow.dag_settings)
        # What DVC would say of edited runs is not known before a run that is not a dry run.
        if not (self._has_dvc(overridden=True) and is_current(self._jobs.config) and dvc_state.LOCK.is_file()):
            _check_damage(found, None)
            self._run_again(found)
            return
        if executing:
            remove_broken_rwlock()
        summary = LockSummary()
        unsettled = [name for name in planned if name in found.missing or not summary.has_receipt(name)]
        damaged = found.changed or found.added
        if not summary.is_current and (fault := lock_fault()):
            raise WorkflowError(fault)
        lacking = [name for name in unsettled if not self._holds(planned[name], found)]
        if not damaged and not lacking:
            return
        # DVC, which takes seconds, and minutes for a thousand new runs, restores only what dvc.lock has.
        if not damaged and not any(
            summary.may_restore(name, functools.partial(_is_of_today, planned[name])) for name in lacking
        ):
            self._run_again(found)
            return
        from dvc.exceptions import DvcException

        try:
            with repository() as repo:
                cache = CachedStages(repo)
                _check_damage(found, cache)
                self._restore(cache, [planned[name] for name in unsettled], found, executing)
                if executing and not summary.is_current:
                    write_summary(repo.index.stages)
        except DvcException as error:
            print(f"nothing is restored from DVC's cache: {error}", file=sys.stderr)
        self._run_again(known.check(planned) if executing else found)

    def _holds(self, job: "PlannedJob", found: Findings) -> bool:
        """Return whether a stage has a receipt of today's settings, code and inputs, and all of its outputs."""
        receipt = self._receipts.of(job.name)
        return (
            receipt is not None
            and job.name not in found.missing
            and _is_of_today(job, receipt)
            and self._receipts.changed_input(receipt) is None
        )

    def _restore(self, cache: CachedStages, jobs: Iterable["PlannedJob"], found: Findings, executing: bool) -> None:
        """Restore those of these stages that are not as today's config asks for them, but whose receipt in dvc.lock is.
        In a dry run, count their outputs as present. The jobs are in the order in which they depend on each other."""
        restored: dict[str, list[str]] = {}
        promised: list[str] = []
        for job in jobs:
            name = job.name
            if _is_forced(name, self._workflow.dag_settings) or self._holds(job, found):
                continue
            receipt = cache.receipt(name)
            if not (receipt and _is_of_today(job, receipt)):
                continue
            # What is there is replaced only by what needs no job. Without a receipt it counts for nothing.
            if self._receipts.of(name) and self._receipts.changed_input(receipt):
                continue
            lacking = cache.lacking(name, receipt, self._receipts.hashes.of)
            if not lacking:
                continue
            restored[name] = lacking
            found.missing.pop(name, None)
            if executing:
                cache.restore(name, lacking)
                self._receipts.reread(name)
            else:
                self._receipts.promise(name, receipt)
                promised += receipt.outputs
        if not restored:
            return
        if promised:
            count_as_present(self._workflow, promised)
        paths = [path for several in restored.values() for path in several]
        few = len(paths) <= 4
        listed = ", ".join(paths) if few else f"{len(paths)} outputs of {counted(len(restored), 'stage')}"
        print(f"{'restored' if executing else 'a run restores'} from DVC's cache: {listed}", file=sys.stderr)

    def _run_again(self, found: Findings) -> None:
        """Have Snakemake run the stages with missing files, and name what is there without a receipt."""
        for stage, paths in found.missing.items():
            if self._receipts.of(stage) and any(self._receipts.hashes.of(path) is None for path in paths):
                print(f"{paths[0]} is missing and not in DVC's cache: {stage} runs again", file=sys.stderr)
                self._receipts.void(stage)
        unknown = [
            path
            for name, job in self._planned.items()
            if not path_of(name).exists() and not self._receipts.of(name)
            for path in job.outputs
            if Path(path).exists()
        ]
        if unknown:
            others = f" and {counted(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
            print(f"{unknown[0]}{others}: no receipt says which job wrote it; it is made again", file=sys.stderr)

    def _receipt_of(self, job: Any) -> Receipt | None:
        """Return the receipt by which Snakemake decides on a job; None if it has none."""
        return self._receipts.of(stage_of(job))

    def _waits_for_render(self, job: Any) -> list[Any]:
        """Return the jobs that may refuse a run within seconds, before a model of it computes for minutes."""
        if job.rule.name not in MODELS_ALONE:
            return []
        names = self._jobs.of(job.wildcards).renders
        return [each for each in self._renders if each.wildcards.rendered in names]

    @functools.cached_property
    def _renders(self) -> list[Any]:
        return [job for job in self._workflow.dag.jobs if job.rule.name == "render"]

    def _begin_job(self, job: Any) -> None:
        """Write that a job starts, and note what it reads. With `--touch` none does."""
        if job.rule.name in TARGET_RULES or self._workflow.touch:
            return
        if not self._inputs_at_start:
            os.environ[PLANNED] = digest(*self._jobs.texts())  # for jobs that read the config again
        stage = stage_of(job)
        damaged = self._receipts.check([stage]).changed
        if damaged and self._has_dvc(overridden=True):
            with repository() as repo:
                CachedStages(repo).drop_damaged(stage)
        self._receipts.begin(stage)
        for log in job.log:
            forget(Path(log))
        self._inputs_at_start[stage] = {path: stamp(path) for path in inputs_of(job)}

    def _end_job(self, job: Any) -> None:
        """Write the receipt of a job that has ended well.

        What an input was at the job's start is not known if it has changed meanwhile: without a receipt the job runs
        again.
        """
        if job.rule.name in TARGET_RULES or self._workflow.touch:
            return
        stage = stage_of(job)
        changed = [
            path for path, then in self._inputs_at_start.get(stage, {}).items() if then not in (None, stamp(path))
        ]
        if changed:
            self._meanwhile[stage] = changed[0]
        else:
            self._receipts.write(stage, params_of(job), inputs_of(job), map(str, job.output))
        self._receipts.hashes.save()

    def _record(self, repo: Any, names: list[str], summary: LockSummary) -> None:
        """Record stages in DVC, and fill its cache where it has lost some of their outputs."""
        lost = [name for name in names if summary.has_receipt(name) and not summary.is_recorded(name)]
        if lost:
            cache = CachedStages(repo)
            for name in lost:
                cache.drop_damaged(name)
        changed, stages = record(repo, names, lost)
        if lost:
            others = f" and {counted(len(lost) - 1, 'other')}" if len(lost) > 1 else ""
            print(f"{lost[0]}{others}: DVC's cache had lost some of its outputs, and has them again", file=sys.stderr)
        for name in changed:
            receipt = self._receipts.of(name)
            assert receipt
            self._receipts.hashes.accept_links(receipt.outputs)
        write_summary(stages)

    def _why_unrecorded(self, stage: str, job: Any) -> str | None:
        """Return why a stage is not recorded in DVC; None if it is."""
        receipt = self._receipts.of(stage)
        if stage in self._meanwhile:
            return f"{self._meanwhile[stage]} has changed while {stage} read it"
        if receipt is None or receipt.params != params_of(job):
            return ""  # it has not run
        if path := self._receipts.changed_input(receipt):
            return f"{path} has changed since {stage} read it"
        if stage == "resolve" and receipt.params["sources"] != self._jobs.read_sources():
            return "the source code, or a file that the config names, was edited during the run"
        found = self._receipts.check([stage])
        wrong = [path for kind in (found.changed, found.added, found.missing) for path in kind.get(stage, [])]
        return f"{', '.join(wrong)} is not what {stage} wrote" if wrong else None

    def _check_before_dvc_records(self) -> None:
        """End this process, a job of `dvc repro`, with an error if what its stage read has been edited meanwhile: DVC
        would take the edited files for what the stage was made of."""
        reason = next((f"{path} has changed while {stage} read it" for stage, path in self._meanwhile.items()), "")
        if os.environ["DVC_STAGE"] == "resolve":
            if not self._is_config_as_read():
                reason = f"{CONFIG_FILE} was edited during the run"
            elif self._jobs.sources != self._jobs.read_sources():
                reason = "the source code, or a file that the config names, was edited during the run"
        if reason:
            print(f"{reason}; run `dvc repro` again", file=sys.stderr)
            sys.exit(1)

    def _is_config_as_read(self) -> bool:
        try:
            return with_overrides(CONFIG_FILE, NOTHING).values == self._jobs.values
        except UserError:
            return False

    def _has_dvc(self, overridden: bool = False) -> bool:
        """Return whether DVC records this run: not inside `dvc repro`, which does so itself, and, without `overridden`,
        not with values besides those of the config file."""
        outside = "DVC_STAGE" not in os.environ and (overridden or not self._overridden)
        return outside and Path(".dvc").is_dir() and dvc_state.PIPELINE.is_file()


def _check_damage(found: Findings, cache: CachedStages | None) -> None:
    """Raise WorkflowError if an output is damaged, with a line for each: what it is, and how to get it back."""
    lines = []
    for stage, paths in found.changed.items():
        for path in paths:
            output = cache and cache.output_of(stage, path)
            way = f"`dvc checkout --force {output}` restores it" if output else f"delete it, and {stage} runs again"
            lines.append(f"{path}: is not what {stage} wrote; {way}")
    for stage, paths in found.added.items():
        lines += [f"{path}: {stage} did not write it; move it out of {Path(path).parent}" for path in paths]
    if lines:
        raise WorkflowError("\n".join(lines))


def _is_of_today(job: "PlannedJob", receipt: Receipt) -> bool:
    """Return whether a receipt has today's settings and code of a job."""
    return all(receipt.params.get(name) == text for name, text in job.params.items())


def _is_forced(stage: str, settings: Any) -> bool:
    """Return whether the user has told Snakemake to run a stage whatever its outputs are (--forcerun, --forceall)."""
    return bool(settings.forceall or stage.partition("@")[0] in settings.forcerun)


def _without_forced(found: Findings, settings: Any) -> Findings:
    """Drop the stages that run whatever their outputs are."""
    for stage in {*found.changed, *found.added, *found.missing}:
        if _is_forced(stage, settings):
            found.drop(stage)
    return found


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
    in its subdirectories too. It is of the user and of no project, since a copied project has that file as well.
    """
    if os.environ.get(SITE_CACHE_VARIABLE):
        return
    try:
        folder = cache_folder() / SITE_CACHE
    except RuntimeError:  # without a home directory, as in some containers
        folder = Path(".cache", SITE_CACHE).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise WorkflowError(f"{folder}: is another user's, who could plant code for DVC there; set XDG_CACHE_HOME")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    entry = f"    site_cache_dir = {folder}\n"
    text = DVC_LOCAL_CONFIG.read_text(encoding="utf-8") if DVC_LOCAL_CONFIG.exists() else ""
    if entry in text:
        return
    text = re.sub(r"^\s*site_cache_dir\s*=.*\n", "", text, flags=re.MULTILINE)
    core = re.compile(r"^\[core\]\n", re.MULTILINE)
    text = core.sub(lambda match: match[0] + entry, text, count=1) if core.search(text) else f"[core]\n{entry}{text}"
    DVC_LOCAL_CONFIG.write_text(text, encoding="utf-8")


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


def stage_of(job: Any) -> str:
    """Return the DVC stage of a Snakemake job, as in train@default."""
    names = "-".join(job.wildcards_dict.values())
    return f"{job.rule.name}@{names}" if names else str(job.rule.name)
