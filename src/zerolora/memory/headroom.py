"""Headroom above the predicted host memory: what the estimate compares with a machine, and Slurm is asked for."""

SHARE = 1.2
"""Times the prediction. The lowest prediction for CPU ranks was 2 % below the measurement
(benchmarks/memory/measure.py); the rest is for what is not measured: other allocators, and CUDA's host memory."""
JOB_BYTES = 400 * 1024**2
"""Bytes of what runs beside the ranks on a job's first node: two Snakemake processes and the launcher; measured by
benchmarks/process_memory.py."""


def asked(predicted: float) -> int:
    """Return the bytes of a node's memory to ask for, for a predicted number of bytes."""
    return int(predicted * SHARE) + JOB_BYTES
