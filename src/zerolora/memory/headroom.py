"""Headroom above the predicted host memory, for the comparison with a machine and for requests to Slurm."""

SHARE = 1.2
"""Times the prediction. The lowest prediction for CPU ranks was 2 % below the measurement
(benchmarks/memory/measure.py); the rest is for what is not measured: other allocators, and CUDA's host memory."""
JOB_BYTES = 400 * 1024**2
"""Bytes of what runs beside the ranks on a job's first node: two Snakemake processes and the launcher; measured by
benchmarks/process_memory.py."""
CUDA_BYTES = 360 * 1024**2
"""Bytes that the libraries of torch's CUDA build need beyond those of its CPU build, whether or not there is a GPU;
measured by benchmarks/process_memory.py. Ranks of a node share them."""


def asked(predicted: float) -> int:
    """Return the bytes of a node's memory to request, for `predicted` bytes. They do not depend on the build of torch
    that is installed."""
    return int(predicted * SHARE) + JOB_BYTES + CUDA_BYTES
