"""Snakemake's Slurm executor: a job that was preempted for good ends.

Imported by workflow/, so nothing here imports torch.
"""

import sys
from collections.abc import Mapping
from typing import Any

from zerolora.compat.versions import is_replaced, patch, replaced

LIBRARY = "snakemake-executor-plugin-slurm"


def cancel_preempted_jobs() -> None:
    """Apply `preempted_is_cancelled` if this process submits jobs to Slurm."""
    executor: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if executor is not None:
        preempted_is_cancelled(executor)


@patch(LIBRARY, "2.8.0", upstream="none found")
def preempted_is_cancelled(executor: Any) -> None:
    """Make the executor treat a job that ended as PREEMPTED like one that was cancelled.

    Slurm preempts by REQUEUE, where the job is pending again, or by CANCEL, where it ends in the state PREEMPTED. The
    executor takes PREEMPTED for the first kind and waits for ever (check_active_jobs, `status == "PREEMPTED"`).
    Only states that come from the controller (squeue) are changed: there a requeued job is PENDING at once, whereas
    accounting (sacct) calls it PREEMPTED until it runs again.
    """
    if is_replaced(executor.query_job_status):
        return
    original = executor.query_job_status

    async def query_job_status(command: str, logger: Any) -> tuple[Mapping[str, str] | None, float | None]:
        states, seconds = await original(command, logger)
        if states and command.startswith("squeue"):
            states = {job: "CANCELLED" if state == "PREEMPTED" else state for job, state in states.items()}
        return states, seconds

    executor.query_job_status = replaced(query_job_status)
