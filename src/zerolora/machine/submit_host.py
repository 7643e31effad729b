"""Whether this machine submits jobs to Slurm, so that its own GPUs, compilers and memory do not matter to them."""

import os
import shutil


def submits() -> bool:
    """Return whether jobs are submitted from here: Slurm's sbatch is installed, and this is not a job itself."""
    return shutil.which("sbatch") is not None and "SLURM_JOB_ID" not in os.environ
