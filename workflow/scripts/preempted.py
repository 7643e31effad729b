"""What Snakemake has to be taught about jobs that Slurm preempts.

Preempted by REQUEUE a job waits in the queue again. Preempted by CANCEL it is gone for good, in the state PREEMPTED,
which the Slurm executor (2.8) takes for the other case: it waits for ever.
"""

import sys
from collections.abc import Mapping
from typing import Any


def cancel_preempted_jobs() -> None:
    """Have the Slurm executor, if it is there, take a job that ended as PREEMPTED for one that was cancelled.

    Only where it asks the controller (squeue), to which a job that is requeued is PENDING at once; accounting (sacct)
    calls it PREEMPTED until it runs again.
    """
    executor: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if executor is None or getattr(executor.query_job_status, "ends_preempted", False):
        return
    original = executor.query_job_status

    async def query_job_status(command: str, logger: Any) -> tuple[Mapping[str, str] | None, float | None]:
        states, seconds = await original(command, logger)
        if states and command.startswith("squeue"):
            states = {job: "CANCELLED" if state == "PREEMPTED" else state for job, state in states.items()}
        return states, seconds

    query_job_status.ends_preempted = True  # type: ignore[attr-defined]
    executor.query_job_status = query_job_status
