# The checked config, and functions that look up a job's settings in it by wildcards (workflow/scripts/jobs.py).

import sys
from pathlib import Path

sys.path.insert(0, str(Path("workflow/scripts").resolve()))
import startup

JOBS = startup.start(workflow)
shell.prefix(startup.JOB_PREFIX)
import engine_sync

from zerolora.config.stages import ON_REQUEST, STAGES


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


def settings(stage):
    """A params function: the settings of a stage."""
    return lambda wildcards: JOBS.of(wildcards).settings(stage)


def code(stage):
    """A params function: the code fingerprint of a stage."""
    return lambda wildcards: JOBS.of(wildcards).code(stage)


def requested(stage, what):
    """A resources function: a stage's request to the machine or the scheduler."""

    def of_job(wildcards, threads, attempt):
        return JOBS.of(wildcards).requested(stage, what, threads, attempt)

    return of_job


def job_resources(stage):
    """The time and the memory of a stage, the latter under HTCondor's name too."""
    requests = {
        "runtime": "minutes",
        "mem_mb": "mem_mib",
        "htcondor_request_mem_mb": "mem_mib",
    }
    return {name: requested(stage, what) for name, what in requests.items()}


def gpu_resources(stage):
    """The resources of a stage that may use GPUs. `gpu` and `request_gpus` are a job's total, for Snakemake and the
    executors of other schedulers (docs/gpu.md); `gres`, `node_gpus` and `lsf_extra` are those of each node.
    """
    requests = {
        "gres": "gres",
        "gpu": "all_gpus",
        "request_gpus": "all_gpus",
        "node_gpus": "gpus",
        "lsf_extra": "lsf",
    }
    of_job = {name: requested(stage, what) for name, what in requests.items()}
    return {**job_resources(stage), **of_job, "gpu_manufacturer": "nvidia"}
