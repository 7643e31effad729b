"""Whether training has machines of its own, so that this one's GPUs, compilers and memory do not matter to it."""

import os
import shutil

STAGE_JOB = "ZEROLORA_STAGE_JOB"
"""Environment variable of a job that is one stage of a run; training is another job, maybe on other machines."""


def submits() -> bool:
    """Return whether training is another Slurm job than this process: sbatch is installed, and this is no job itself,
    or one of a single stage."""
    return shutil.which("sbatch") is not None and ("SLURM_JOB_ID" not in os.environ or STAGE_JOB in os.environ)
