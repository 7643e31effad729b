"""Memory of a GPU beside torch's tensors: the CUDA context, NCCL's buffers, and what torch's allocator leaves unused.

None of it is traced, and none was measured by this project: the figures are published ones, each with its source.
benchmarks/gpu.py measures every share where there is a GPU (docs/gpu.md).
"""

from zerolora.memory.training_spec import TrainingSpec

MIB = 2**20
CONTEXT = 426 * MIB
"""A context of CUDA 13 with kernels that are loaded when they are first used: unslothai/unsloth-zoo#1053 (torch 2.10,
RTX 6000 Ada); about 400 MB says pytorch/pytorch#109888."""
CONNECTION = (10 + 2) * MIB
"""The buffers between two ranks in one channel: NVIDIA/nccl#1685."""
CHANNELS = 32
"""The most channels that NCCL opens: NVIDIA/nccl#1685. A ring connects a rank to one before it and one behind it,
however many ranks there are (NVIDIA/nccl#986)."""
UNUSED = 0.024
"""Share of the allocated memory that torch's allocator holds besides: 1.83 GiB of 75.31 GiB with a 70B model
(vllm-project/compressed-tensors#587), 3.0 % in pytorch/pytorch#44742, 0.9 % in vllm-project/vllm#10637. It can be far
more where blocks of many sizes alternate (15 % in the mean, arXiv 2401.08156)."""


def shares(spec: TrainingSpec, allocated: float) -> dict[str, int]:
    """Return the bytes beside `allocated` bytes of tensors, by share and in total; the total alone if it is given."""
    if spec.on_cpu:
        return {"total": 0}
    if spec.reserve is not None:
        return {"total": spec.reserve}
    result = {"context": CONTEXT, "nccl": CONNECTION * CHANNELS * groups(spec), "allocator": int(UNUSED * allocated)}
    return {**result, "total": sum(result.values())}


def groups(spec: TrainingSpec) -> int:
    """Return how many groups of ranks communicate through NCCL: all, and those of a node and between the nodes if the
    strategy shards within a node."""
    if spec.ranks == 1:
        return 0
    return 3 if spec.layout.within_node and spec.nodes > 1 and spec.ranks_per_node > 1 else 1
