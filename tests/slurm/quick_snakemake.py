"""Snakemake, but it looks at its Slurm jobs every two seconds, and says after two what a job waits for.

The Slurm plugin looks after 20 seconds, then 30, 40 … more: right for a controller that a whole site asks, and minutes
of waiting for jobs that last seconds. Nothing else differs.
"""

import sys

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from zerolora.compat import slurm_queue

if __name__ == "__main__":
    RemoteExecutor.next_seconds_between_status_checks = property(lambda _: 2, lambda *_: None)
    slurm_queue.WAITING_SECONDS = 2
    sys.exit(main())
