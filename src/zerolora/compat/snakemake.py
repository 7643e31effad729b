"""Snakemake: how it decides again after a checkpoint, and how a resource says that it is not known yet.

Imported by workflow/, so nothing here imports torch.
"""

from typing import Any

from zerolora.compat.versions import is_replaced, patch, replaced

VERSION = "9.27.1"


@patch("snakemake", VERSION, upstream="none found; docs/engines.md")
def reset_job_reasons() -> None:
    """Make Snakemake decide about every pending job anew whenever a checkpoint has run.

    It evaluates the DAG again at that moment, but adds to its earlier reasons instead of forming new ones: a job that
    was expected to see changed inputs runs although they turned out the same, and a job that was hidden behind such a
    job is forgotten. With the earlier reasons dropped its decision is that of DVC: a stage runs if what it reads has
    changed. docs/engines.md lists what else was tried; tests/workflow/test_decisions.py compares with an oracle.
    """
    from snakemake.dag import DAG

    if is_replaced(DAG.update_needrun):
        return
    original = DAG.update_needrun

    async def update_needrun(dag: Any, create_inventory: bool = False) -> None:
        for job in list(dag.jobs):
            if not dag.finished(job) and job not in dag._running:
                dag._reason.pop(job, None)
        await original(dag, create_inventory)

    DAG.update_needrun = replaced(update_needrun)


@patch("snakemake", VERSION, upstream="none found")
def undetermined() -> Any:
    """Return the value of a resource that is not known until other jobs have run; Snakemake then asks again.

    Snakemake itself uses this value when a resource function fails for a missing input file (rules.py,
    expand_resources), but the files that tell our resources are not inputs of every job.
    """
    from snakemake.common.tbdstring import TBDString

    return TBDString()
