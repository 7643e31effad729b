"""The named strategies as what their engine reads: DeepSpeed JSON, or the options of torch's DDP and FSDP2.

Every value stands here once, beside its reason. docs/rendering.md lists the traps that the values avoid.
"""

from collections.abc import Iterator
from typing import Any, Literal

from zerolora.errors import UserError
from zerolora.memory.buffers import Buckets
from zerolora.planner.reasons import Reason, nested
from zerolora.strategies import STRATEGIES, Strategy

Device = Literal["cpu", "cuda"]
ZERO = "zero_optimization"
CONFIG = "deepspeed/runtime/zero/config.py"
OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
BYTES_FP32 = 4


def strategy_json(
    strategy: Strategy, buckets: Buckets, device: Device, ranks_per_node: int, nvme: str | None, precision: str
) -> tuple[dict[str, Any], list[Reason]]:
    """Return (`zero_optimization`, reasons) of a strategy of DeepSpeed.

    `nvme` is the folder that states move to. Raises UserError if the strategy cannot run like that.
    """
    check(strategy, device, ranks_per_node, ranks_per_node, nvme, precision)
    reasons = [
        *_stage(strategy),
        *_sizes(strategy, buckets),
        *_within_node(strategy, ranks_per_node),
        *_quantized(strategy, precision),
        *_offload(strategy, buckets, device, ranks_per_node, nvme),
    ]
    return nested(reasons)[ZERO], reasons


def aio_json() -> list[Reason]:
    """Return the `aio` section that NVMe needs. It stands at the top level: inside zero_optimization DeepSpeed
    refuses it (DeepSpeed#2721)."""
    source = "deepspeed/runtime/swap_tensor/constants.py"
    tune = "DeepSpeed's default; `ds_nvme_tune` measures what your disk likes best"
    return [
        Reason("aio.block_size", 1 << 20, f"bytes of one request: {tune}", source),
        Reason("aio.queue_depth", 8, f"requests under way: {tune}", source),
        # Threads widen the alignment of every swapped tensor: swap_tensor/partitioned_param_swapper.py, aligned_bytes.
        Reason("aio.intra_op_parallelism", 1, "one thread a request keeps the padding of each tensor small", source),
        Reason("aio.single_submit", False, "requests go to the kernel together", source),
        Reason("aio.overlap_events", True, "requests are submitted while others are waited for", source),
    ]


def ddp_json(buckets: Buckets) -> list[Reason]:
    """Return the options of torch's DistributedDataParallel."""
    source = "torch/nn/parallel/distributed.py"
    megabytes = -(-buckets.reduce * BYTES_FP32 // (1 << 20)) or 25
    return [
        Reason("ddp.bucket_cap_mb", megabytes, "fp32 gradients reduced together, MiB; 25 is torch's own", source),
        Reason("ddp.gradient_as_bucket_view", True, "gradients lie in the buckets: no second copy of them", source),
        Reason(
            "ddp.static_graph",
            False,
            "only reentrant checkpointing needs it, and with the other kind it does not work",
            "pytorch#69060",
        ),
    ]


def fsdp_json(
    strategy: Strategy, ranks: int, ranks_per_node: int, precision: str, activation_checkpointing: bool
) -> list[Reason]:
    """Return the options of torch's FSDP2 (`fully_shard`)."""
    source = "torch/distributed/fsdp/_fully_shard/_fully_shard.py"
    if strategy.within_node:
        mesh, why = [ranks // ranks_per_node, ranks_per_node], "nodes x ranks of a node: shared out inside a node only"
    else:
        mesh, why = [ranks], "shared out among all ranks"
    return [
        Reason("fsdp.mesh", mesh, why, source),
        Reason(
            "fsdp.reshard_after_forward",
            True,
            "a layer's weights are freed after use and gathered again for the backward pass",
            source,
        ),
        Reason("fsdp.wrap", "_no_split_modules", "one unit a decoder layer, as transformers names them", source),
        Reason(
            "fsdp.param_dtype",
            precision,
            "adapter weights are kept in fp32 and gathered in this; a unit's trained weights must be of one dtype",
            "accelerate#3985",
        ),
        Reason("fsdp.reduce_dtype", "fp32", "gradients of the adapter are small: their sum costs little", source),
        Reason(
            "fsdp.activation_checkpointing",
            activation_checkpointing,
            "each unit's input only, recomputed with its weights gathered once",
            "transformers/modeling_layers.py",
        ),
    ]


def check(
    strategy: Strategy, device: Device, ranks: int, ranks_per_node: int, nvme: str | None, precision: str
) -> None:
    """Raise UserError if a strategy cannot run on this device, in this precision, on so many ranks."""
    name = next((name for name, one in STRATEGIES.items() if one == strategy), "your JSON")
    if fault := _fault(strategy, device, ranks, ranks_per_node, nvme, precision):
        raise UserError(f"render.strategy is {name}, {fault}")


def _fault(
    strategy: Strategy, device: Device, ranks: int, ranks_per_node: int, nvme: str | None, precision: str
) -> str | None:
    on_disk = "nvme" in (strategy.optimizer, strategy.parameters)
    if strategy.quantized and device == "cpu":
        # deepspeed/runtime/zero/partition_parameters.py, CUDAQuantizer: its kernels are written for CUDA only.
        return "and hardware.device is cpu, which has no kernels for it; write zero3"
    if on_disk and not nvme:
        return "and there is no folder to move states to; write hardware.nvme: /path/on/a/local/nvme"
    if on_disk and precision == "fp32":
        # Seen: stage 3 swaps 16-bit tensors only (swap_tensor/partitioned_param_swapper.py, invalid_buffer is half).
        return "and train.precision is fp32, which DeepSpeed cannot swap; write bf16, or strategy zero3_offload"
    if strategy.within_node and ranks % ranks_per_node:
        # deepspeed/utils/groups.py, _ensure_divisibility; a mesh of torch has no ragged row either.
        return (
            f"and {ranks} ranks are no multiple of train.ranks_per_node {ranks_per_node}; write a number that "
            f"divides {ranks}, or strategy {'zero3' if strategy.engine == 'deepspeed' else 'fsdp'}"
        )
    if strategy.engine != "deepspeed" and precision == "fp16":
        return "and train.precision is fp16, whose loss scaling is DeepSpeed's; write bf16, or a zero strategy"
    return None


def _stage(strategy: Strategy) -> Iterator[Reason]:
    shared = ("nothing", "optimizer states", "optimizer states and gradients", "weights, gradients, optimizer states")
    yield Reason(f"{ZERO}.stage", strategy.stage, f"shared out: {shared[strategy.stage]}", "arXiv 1910.02054")


def _sizes(strategy: Strategy, buckets: Buckets) -> Iterator[Reason]:
    if strategy.stage == 0:
        return
    yield Reason(f"{ZERO}.contiguous_gradients", True, "no fragments while gradients appear one by one", CONFIG)
    if strategy.stage < 3:
        overlap = (
            "the adapter's gradients are too few to hide, and a second bucket costs memory; more than once the two "
            "buckets have raced and given NaN"
            if not buckets.overlap
            else "gradients are reduced beside the backward pass"
        )
        yield Reason(f"{ZERO}.overlap_comm", buckets.overlap, overlap, "DeepSpeed#5545, #7188, #7965, #8061")
    else:
        overlap = "weights and gradients move beside computing" if buckets.overlap else "a CPU has no second stream"
        yield Reason(f"{ZERO}.overlap_comm", buckets.overlap, overlap, CONFIG)
    yield _size("reduce_bucket_size", buckets.reduce, "elements of gradients reduced together; more is never used")
    if strategy.stage < 3:
        yield _size("allgather_bucket_size", buckets.allgather, "elements of updated weights gathered together")
        return
    yield _size("stage3_prefetch_bucket_size", buckets.prefetch, "elements gathered ahead: about one layer")
    yield _size("stage3_param_persistence_threshold", buckets.persistence, "smaller weights stay whole on every rank")
    yield _size(
        "stage3_max_live_parameters",
        buckets.live,
        "the layer at work, the one ahead and the largest module; at 0 nothing is ever fetched ahead",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py, fetch_sub_module",
    )
    yield Reason(
        f"{ZERO}.stage3_max_reuse_distance",
        0,
        "above 0, each module scans the trace of all that follow; what prefetching has reached is kept at 0 too",
        "deepspeed/runtime/zero/partitioned_param_coordinator.py, __params_to_release",
    )
    yield Reason(
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        False,
        "only the adapter is saved, and it is gathered by itself",
        "trl#4416, peft#2892",
    )


def _size(key: str, elements: int, reason: str, source: str = CONFIG) -> Reason:
    assert elements >= 1, f"{key} needs a size"
    return Reason(f"{ZERO}.{key}", elements, reason, source)


def _within_node(strategy: Strategy, ranks_per_node: int) -> Iterator[Reason]:
    if strategy.within_node:
        yield Reason(
            f"{ZERO}.zero_hpz_partition_size",
            ranks_per_node,
            "ranks of a node: the backward pass gathers weights inside it",
            "arXiv 2306.10209, 4.2; deepspeed/utils/groups.py, _create_zero_param_parallel_group",
        )


def _quantized(strategy: Strategy, precision: str) -> Iterator[Reason]:
    if not strategy.quantized:
        return
    yield Reason(f"{ZERO}.zero_quantized_weights", True, "weights travel as int8 with scales", "arXiv 2306.10209, 4.1")
    # stage3.py, quantize_nontrainable_params: asserts fp16. Without that call the key does nothing for weights that
    # were frozen after loading, as LoRA's are.
    half = precision == "fp16"
    yield Reason(
        f"{ZERO}.zero_quantized_nontrainable_weights",
        half,
        "frozen weights are kept as int8 too" if half else "DeepSpeed can keep frozen weights as int8 in fp16 only",
        "DeepSpeed#3954; deepspeed/runtime/zero/stage3.py, quantize_nontrainable_params",
    )


def _offload(
    strategy: Strategy, buckets: Buckets, device: Device, ranks_per_node: int, nvme: str | None
) -> Iterator[Reason]:
    for key, place in (("offload_optimizer", strategy.optimizer), ("offload_param", strategy.parameters)):
        if place == "gpu":
            continue
        what = "master weights and moments" if key == "offload_optimizer" else "a rank's share of the weights"
        yield Reason(f"{ZERO}.{key}.device", place, f"{what} lie there between uses", OFFLOAD)
        pinned = device == "cuda"
        why = "copies from page-locked memory run beside computing" if pinned else "a CPU copies nothing to a device"
        yield Reason(f"{ZERO}.{key}.pin_memory", pinned, why, OFFLOAD)
        if place == "nvme":
            yield Reason(f"{ZERO}.{key}.nvme_path", nvme, "hardware.nvme", OFFLOAD)
            yield from _nvme_buffers(key, buckets, ranks_per_node)


def _nvme_buffers(key: str, buckets: Buckets, ranks_per_node: int) -> Iterator[Reason]:
    if key == "offload_optimizer":
        yield Reason(f"{ZERO}.{key}.buffer_count", 4, "Adam's weight, gradient and two moments", OFFLOAD)
        return
    yield Reason(
        f"{ZERO}.{key}.buffer_count",
        5,
        "one weight at work, others being read; with too few DeepSpeed fails",
        "DeepSpeed#3062",
    )
    yield _size(
        f"{key}.buffer_size",
        -(-buckets.live // ranks_per_node),
        "elements; no weight's share is larger than a rank's part of all live weights",
        "deepspeed/runtime/swap_tensor/partitioned_param_swapper.py",
    )
