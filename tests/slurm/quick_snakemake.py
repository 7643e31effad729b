"""Snakemake, but it looks at its Slurm jobs every two seconds.

The Slurm plugin looks after 40 seconds, then 50, 60 … more: right for an accounting database that a whole site asks,
and minutes of waiting for jobs that last seconds. Nothing else differs.
"""

import asyncio
import sys
from typing import Any

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor


async def _two_seconds(executor: Any) -> None:
    await asyncio.sleep(2)


if __name__ == "__main__":
    RemoteExecutor.sleep = _two_seconds
    sys.exit(main())
