"""Memory beyond the traced bytes: a GPU's CUDA context, NCCL buffers and unused blocks, and the headroom of a host.

The GPU's figures are published ones, each with its source; benchmarks/gpu.py measures them on a GPU (docs/gpu.md).
"""

from zerolora.memory.training_spec import TrainingSpec

MIB = 2**20
CONTEXT = 426 * MIB
"""A context of CUDA 13 with lazily loaded kernels: unslothai/unsloth-zoo#1053 (torch 2.10, RTX 6000 Ada); about 400 MB
in pytorch/pytorch#109888."""
CONNECTION = (10 + 2) * MIB
"""The buffers between two ranks in one channel: NVIDIA/nccl#1685."""
CHANNELS = 32
"""NCCL's maximum: NVIDIA/nccl#1685. A ring connects a rank to two others, however many ranks there are
(NVIDIA/nccl#986)."""
UNUSED = 0.024
"""Memory that torch's allocator reserves but does not use, as a share of the allocated memory: 1.83 GiB of 75.31 GiB
with a 70B model (vllm-project/compressed-tensors#587), 3.0 % in pytorch/pytorch#44742, 0.9 % in
vllm-project/vllm#10637. It can be far more where blocks of many sizes alternate (15 % on average, arXiv 2401.08156)."""
SHARE = 1.2
"""Host memory to request over the predicted. The lowest prediction for CPU ranks was 2 % below the measurement
(benchmarks/memory/measure.py); the rest is for other allocators and CUDA's host memory, which were not measured."""
JOB_BYTES = 400 * 1024**2
"""Bytes of two Snakemake processes and the launcher on a job's first node (benchmarks/process_memory.py)."""
CUDA_BYTES = 360 * 1024**2
"""Bytes of the libraries of torch's CUDA build beyond those of its CPU build, with or without a GPU, shared by the
ranks of a node (benchmarks/process_memory.py)."""


def shares(spec: TrainingSpec, allocated: float, idle: float = 0.0) -> dict[str, int]:
    """Return the bytes beside `allocated` bytes of tensors, by share and in total; only the total if it is set.

    `idle`: bytes that torch's allocator keeps for the stream that gathers weights (gpu.py, idle_bytes).
    """
    if spec.on_cpu:
        return {"total": 0}
    if spec.reserve is not None:
        return {"total": spec.reserve}
    result = {"context": CONTEXT, "nccl": CONNECTION * CHANNELS * groups(spec), "allocator": int(UNUSED * allocated)}
    result["streams"] = int(idle)
    return {**result, "total": sum(result.values())}


def groups(spec: TrainingSpec) -> int:
    """Return the number of a rank's NCCL groups: all ranks, and those within and across nodes if the strategy shards
    within a node."""
    if spec.ranks == 1:
        return 0
    return 3 if spec.layout.within_node and spec.nodes > 1 and spec.ranks_per_node > 1 else 1


def with_headroom(predicted: float) -> int:
    """Return the bytes of a node's memory to request for `predicted` bytes, with any build of torch."""
    return int(predicted * SHARE) + JOB_BYTES + CUDA_BYTES
