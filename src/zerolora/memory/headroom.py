"""What to ask of a machine for what is predicted: the estimate refuses by it, and Slurm is asked for it."""

SHARE = 1.2
"""Of the prediction. Host memory of CPU ranks was predicted to 2 % below what they held (benchmarks/memory/measure.py);
the rest is for what was not measured: other allocators, file caches that count, CUDA's side on the host."""
JOB_BYTES = 400 * 1024**2
"""What runs beside the ranks on a job's first node: Snakemake twice, and the launcher; measured by
benchmarks/process_memory.py."""


def asked(predicted: float) -> int:
    """Return the bytes of a node's memory to ask for where so many are predicted."""
    return int(predicted * SHARE) + JOB_BYTES
