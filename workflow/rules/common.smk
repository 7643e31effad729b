# The checked config, and functions that look up a job's settings in it by wildcards (workflow/scripts/jobs.py).

import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

min_version("9.24")

try:
    from zerolora.workflow_files import ROOT, project_file
except ModuleNotFoundError:
    raise WorkflowError(
        f"zerolora is not installed for {sys.executable}, whose Snakemake this is; run `{sys.executable} -m pip install "
        "zerolora`, or the snakemake of the environment that has it"
    ) from None

# The scripts beside these rules; those of the package if the rules are not on this machine's disk.
SCRIPTS = Path(str(workflow.current_basedir), "../scripts").resolve()
if not SCRIPTS.is_dir():
    SCRIPTS = ROOT / "workflow/scripts"
sys.path.insert(0, str(SCRIPTS))
import startup

JOBS = startup.start(workflow)
# A user's workflow with a default target of its own does not change it.
IS_DEFAULT = workflow.default_target is None
shell.prefix(startup.JOB_PREFIX)
import engine_sync
from jobs import user_files

from zerolora.config.stages import ALL_STAGES, PLAIN, STAGES


wildcard_constraints:
    **JOBS.constraints(),


def of(*paths):
    """An input or params function: paths with the job's names in the config, such as the {dataset} and {model} of a
    {run}. Several paths are a list.
    """

    def named(wildcards):
        files = [path.format(**JOBS.of(wildcards).names) for path in paths]
        return files[0] if len(files) == 1 else files

    return named


def job(name):
    """A function of input, params, threads or resources: an attribute of the job (workflow/scripts/jobs.py)."""
    return lambda wildcards: getattr(JOBS.of(wildcards), name)


def below(path):
    """A path for params, which Snakemake does not put below a module's prefix."""
    return JOBS.prefix + path


def path_of(path):
    """The same as a params function, of one path."""
    return of(below(path))


def all_cores(wildcards):
    """The cores that Snakemake may use; 16 if it was started without a number, as for a report."""
    try:
        return workflow.cores
    except WorkflowError:
        return 16


def settings(stage):
    """A params function: the settings of a stage."""
    return lambda wildcards: JOBS.of(wildcards).settings(stage)


def job_of(stage):
    """A params function: a stage and the values of its wildcards, as `zerolora stage` takes them."""
    return lambda wildcards: " ".join(
        [stage, *(wildcards[name] for name in ALL_STAGES[stage].wildcards)]
    )


def names(stage):
    """A params function: the options with the names in the paths of a stage's files."""
    return lambda wildcards: JOBS.of(wildcards).names_option(stage)


def code(stage):
    """A params function: the code fingerprint of a stage."""
    return lambda wildcards: JOBS.of(wildcards).code(stage)


def requested(stage, what):
    """A resources function: a stage's request to the machine or the scheduler."""

    def of_job(wildcards, threads, attempt):
        return JOBS.of(wildcards).requested(stage, what, threads, attempt)

    return of_job


def resources_of(stage):
    """The time and the memory of a stage, the latter under HTCondor's name too, and the GPUs of one that may use some.
    `gpu` and `request_gpus` are a job's total, for Snakemake and the executors of other schedulers (docs/gpu.md);
    `gres`, `node_gpus` and `lsf_extra` are those of each node.
    """
    requests = {
        "runtime": "minutes",
        "mem_mb": "mem_mib",
        "htcondor_request_mem_mb": "mem_mib",
    }
    if not ALL_STAGES[stage].uses_gpus:
        return {name: requested(stage, what) for name, what in requests.items()}
    requests |= {
        "gres": "gres",
        "gpu": "all_gpus",
        "request_gpus": "all_gpus",
        "node_gpus": "gpus",
        "lsf_extra": "lsf",
    }
    of_job = {name: requested(stage, what) for name, what in requests.items()}
    return {**of_job, "gpu_manufacturer": "nvidia"}
