# The checked config, and what the rules look up in it by the wildcards of a job (workflow/scripts/jobs.py).

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
    """An input or params function: paths in which the wildcards may be names that the config has for a job, such as the
    {dataset} and the {model} of a {run}. A list, unless it is one path.
    """

    def named(wildcards):
        files = [path.format(**JOBS.of(wildcards).names) for path in paths]
        return files[0] if len(files) == 1 else files

    return named


def job(name):
    """A function of input, params, threads or resources: an attribute of a job (workflow/scripts/jobs.py)."""
    return lambda wildcards: getattr(JOBS.of(wildcards), name)


def settings(stage):
    """A params function: the settings that a stage reads."""
    return lambda wildcards: JOBS.of(wildcards).settings(stage)


def code(stage):
    """A params function: the fingerprint of the code that a stage runs."""
    return lambda wildcards: JOBS.of(wildcards).code(stage)


def requested(stage, what):
    """A resources function: what a stage requests of the machine or the scheduler."""

    def of_job(wildcards, threads, attempt):
        return JOBS.of(wildcards).requested(stage, what, threads, attempt)

    return of_job
