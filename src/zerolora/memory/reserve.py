"""Memory beyond the traced bytes: a GPU's context, NCCL, kernels, workspaces and unused blocks; the headroom of a host.

From compute capability 9.0 as benchmarks/memory/measure.py measured on one H200 (driver 580, torch 2.11 for CUDA 13;
gpu_memory_*.json in benchmarks/results); other GPUs, and NCCL's buffers between ranks, have published figures.
"""

from zerolora.memory.training_spec import TrainingSpec

MIB = 2**20
HOPPER = 9.0
"""The compute capability from which the measured figures are taken."""
CONTEXT = 426 * MIB
"""A context of CUDA 13 with lazily loaded kernels: unslothai/unsloth-zoo#1053 (torch 2.10, RTX 6000 Ada); about 400 MB
in pytorch/pytorch#109888."""
HOPPER_CONTEXT = 527 * MIB
"""`gpu_context`."""
COMMUNICATOR = 652 * MIB
"""NCCL after the first collective, of one rank (`gpu_connected` less `gpu_context`)."""
CONNECTION = (10 + 2) * MIB
"""The buffers between two ranks in one channel: NVIDIA/nccl#1685."""
CHANNELS = 32
"""NCCL's maximum: NVIDIA/nccl#1685. A ring connects a rank to two others, however many ranks there are
(NVIDIA/nccl#986)."""
KERNELS = 540 * MIB
"""The most that training loaded after the first collective: kernels, and what the engine's own collectives need
(`gpu_in_use` less `gpu_reserved` and `gpu_connected`; 148 MiB at stage 3)."""
WORKSPACES = 2
"""Of cuBLAS, which torch allocates for each thread that computes: those of the forward and the backward pass."""
WORKSPACE, HOPPER_WORKSPACE = 8320 * 1024, 32 * MIB
"""Bytes of a workspace, and from HOPPER on: torch, ATen/cuda/CublasHandlePool.cpp."""
UNUSED = 0.026
"""The margin of a plan, as a share of the allocated memory: the lowest of the predictions on the H200 was 2.6 % below
the measurement (docs/memory.md). torch's allocator reserves as much without using it, and frees whole unused blocks
before it fails, so that is not counted again: 1.83 GiB of 75.31 GiB with a 70B model
(vllm-project/compressed-tensors#587), 3.0 % in pytorch/pytorch#44742, 0.9 % in vllm-project/vllm#10637; on the H200 6 %
in the median, with small models, and up to 52 %; 15 % on average in arXiv 2401.08156."""
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
    measured = spec.capability is not None and spec.capability >= HOPPER
    result = {
        "context": HOPPER_CONTEXT if measured else CONTEXT,
        "nccl": COMMUNICATOR * measured + CONNECTION * CHANNELS * groups(spec),
        "kernels": KERNELS * measured,
        "workspaces": WORKSPACES * (HOPPER_WORKSPACE if measured else WORKSPACE),
        "allocator": int(UNUSED * allocated),
        "streams": int(idle),
    }
    return {**result, "total": sum(result.values())}


def groups(spec: TrainingSpec) -> int:
    """Return the number of a rank's NCCL groups of several ranks: all, and those within and across nodes if the
    strategy shards within a node."""
    if spec.ranks == 1:
        return 0
    return 3 if spec.layout.within_node and spec.nodes > 1 and spec.ranks_per_node > 1 else 1


def with_headroom(predicted: float) -> int:
    """Return the bytes of a node's memory to request for `predicted` bytes, with any build of torch."""
    return int(predicted * SHARE) + JOB_BYTES + CUDA_BYTES
