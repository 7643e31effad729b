"""Startup of each workflow process, before the rules are read and before planning.

Snakemake starts one process for a run and, on a cluster, one for each job.
"""

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_sync import EngineSync
    from jobs import Jobs, PlannedJob

JOB_PREFIX = "set -euo pipefail; export ZEROLORA_JOB_SHELL=$$; "
"""Prefix of every job's command, which ends with this process or the job's shell (machine/parents.py)."""


def start(workflow: Any) -> "Jobs":
    """Prepare this process, and return the jobs of the config.

    Exits with one line on stderr and code 2 if the config is invalid.
    """
    # Collecting garbage among Snakemake's modules while others are imported takes a fifth of the startup.
    gc.freeze()
    from jobs import CONFIG_FILE, Jobs
    from overrides_of_run import check_module, of_module, overrides

    from zerolora.compat import slurm_executor_patches, snakemake_patches
    from zerolora.errors import EXPECTED, message_of
    from zerolora.machine import parents
    from zerolora.machine.submit_host import STAGE_JOB

    # The commands are in the directory of Snakemake's Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ["ZEROLORA_SCRIPTS"] = str(Path(__file__).parent)
    parents.name_engine()
    if "DVC_STAGE" in os.environ and workflow.is_main_process:
        parents.end_with_parent()
    if workflow.remote_exec:
        # The scheduler has assigned this job's GPUs (workflow/scripts/on_gpus).
        os.environ["ZEROLORA_GPUS_DIVIDED"] = "1"
        os.environ[STAGE_JOB] = "1"
    try:
        snakemake_patches.explain_system_errors()
        snakemake_patches.replan_after_same_outputs()
        snakemake_patches.replace_write_protected_outputs()
        slurm_executor_patches.patch_slurm_executor()
        module = snakemake_patches.module_of(workflow)
        over = of_module(module, workflow) if module else overrides(workflow, Path(CONFIG_FILE))
        jobs = Jobs(workflow.is_main_process, over, module.prefix if module else "")
        if module:
            check_module(module, jobs.resolved.runs)
        jobs.check(remote=workflow.remote_exec)
    except EXPECTED as error:
        print(message_of(error), file=sys.stderr)
        sys.exit(2)
    return jobs


def around_planning(workflow: Any, jobs: "Jobs", planned: "Mapping[str, PlannedJob]") -> "EngineSync":
    """Synchronize the engines around planning (engine_sync.py), in a run's main process."""
    from engine_sync import EngineSync
    from keep import RUNS
    from overrides_of_run import report_overrides

    from zerolora.compat.snakemake_patches import around_planning, module_of

    module = module_of(workflow)
    sync = EngineSync(workflow, jobs, planned)

    def before() -> None:
        check_hardware(workflow, jobs)
        limit_jobs(workflow, jobs)
        spare_login_node(workflow, jobs)
        report_overrides(workflow, jobs, module)
        if not module:  # DVC does not know the user's workflow
            sync.before_planning()

    def after() -> None:
        if not module:
            sync.after_planning()
            if workflow.dryrun and RUNS not in os.environ:
                rehearse(workflow, jobs)

    if workflow.is_main_process:
        around_planning(workflow, before, after)
    return sync


def rehearse(workflow: Any, jobs: "Jobs") -> None:
    """Raise WorkflowError, with a line for each job, if a run that is planned would stop before its first step."""
    from engine_sync import stage_of
    from snakemake.exceptions import WorkflowError

    from zerolora.machine.submit_host import submits
    from zerolora.planner.machine_limits import uninstalled

    planned = {stage_of(job) for job in workflow.dag.needrun_jobs()}
    runs = [run for run in jobs.resolved.runs.values() if f"render@{run.rendered}" in planned]
    if not runs:
        return
    from zerolora.check.rehearsal import faults

    here = [] if submits() else runs  # the nodes of a cluster may have what this machine lacks
    missing = [f"render@{run.rendered}: {why}" for run in here for why in uninstalled(run.render).values()]
    if found := [*missing, *(f"{job}: {why}" for job, why in faults(jobs.resolved, planned))]:
        raise WorkflowError("\n".join(dict.fromkeys(found)))


def check_hardware(workflow: Any, jobs: "Jobs") -> None:
    """Raise WorkflowError if the config has no `hardware`, which stands for this machine, and jobs run on others."""
    from snakemake.exceptions import WorkflowError

    if "hardware" not in jobs.values and not (workflow.local_exec or workflow.dryrun):
        raise WorkflowError(
            "config/config.yaml: hardware: is missing, which stands for this machine, but the jobs run on others; "
            "set theirs (config/README.md)"
        )


def spare_login_node(workflow: Any, jobs: "Jobs") -> None:
    """Make estimate and render jobs if they take torch, for any run, and jobs run on other machines."""
    from jobs import PLANNING

    from zerolora.compat.snakemake_patches import submit_local_rules
    from zerolora.probe.listed_trial import takes_shapes

    if workflow.local_exec:
        return
    below = Path(jobs.prefix)
    for name, run in jobs.resolved.runs.items():
        model = jobs.config.prepare[jobs.config.all_runs[name].dataset].model
        if takes_shapes(run.render, below / f"resources/models/{model}", below / f"resources/weights/{model}"):
            submit_local_rules(workflow, PLANNING)
            return


def limit_jobs(workflow: Any, jobs: "Jobs") -> None:
    """Limit local jobs to the config's hardware, unless --resources or the profile sets limits.

    Not in a dry run: it is always local, and would show requests to Slurm reduced to these limits.
    """
    from zerolora.config.resolve import hardware_limits, run_sections

    limits = hardware_limits([run_sections(jobs.config, name) for name in jobs.config.all_runs], os.environ)
    if workflow.local_exec and not workflow.dryrun:
        for name in limits.keys() - workflow.global_resources.keys():
            workflow.register_resource(name, limits[name])
