"""DeepSpeed's ZeRO stages, with offload, hpZ and quantized communication. docs/choice.md lists the known problems.

The collectives are those of DeepSpeed 0.19 with LoRA, not the ZeRO paper's 2Ψ and 3Ψ. "Counted" means counted in a run
of two ranks with a small Llama.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

from zerolora.conflict import Conflict
from zerolora.strategies.strategy import (
    EXCHANGE,
    GATHER,
    INT8_WHOLE,
    REDUCE,
    SCATTER,
    Buckets,
    Collective,
    Compiled,
    ModelSizes,
    Placement,
    Reason,
    StepWork,
    Strategy,
    Target,
)
from zerolora.types import EngineName

ZERO = "zero_optimization"
CONFIG = "deepspeed/runtime/zero/config.py"
ENGINE = "deepspeed/runtime/engine.py"
OFFLOAD = "deepspeed/runtime/zero/offload_config.py"
NEVER = 10**9  # steps between DeepSpeed's own progress lines

# Below this a collective's time is mostly latency: at 10 GB/s and 20 us, 5e6 elements of 2 bytes are 1 ms.
SMALLEST_BUCKET = 5_000_000
LARGEST_BUCKET = 200_000_000
ALIGNMENT = 2  # elements: 4 bytes (stage_1_and_2.py, nccl_start_alignment_factor)

RISKY = {
    "overlap_comm": "overlap_comm has raced several times, and given NaN (DeepSpeed#5545, #7188, #7965, #8061)",
    "zero_quantized_weights": "weights are gathered as int8 (zero_quantized_weights)",
    "zero_quantized_gradients": "gradients are reduced as int4 (zero_quantized_gradients)",
    "zero_quantized_nontrainable_weights": "frozen weights are kept as int8 (zero_quantized_nontrainable_weights)",
}
"""Keys of zero_optimization that have given wrong results or change numbers, with the canary's reason."""

HOOK_OPERATIONS = 100
"""Host time of stage 3's hooks for each linear module and pass, in operations: 90 without and 115 with checkpointing.
Measured on one rank, where nothing is sent, as 1.1 and 1.4 ms, with operations of 12 us, in a 4- and a 12-layer Llama
with adapters on all linear modules."""


class DeepSpeed(Strategy):
    """A strategy of DeepSpeed, or the layout of a user's own DeepSpeed JSON."""

    engine: ClassVar[EngineName] = "deepspeed"

    def conflict(self, target: Target) -> Conflict | None:
        if self.quantized and target.device == "cpu":
            # deepspeed/runtime/zero/partition_parameters.py, CUDAQuantizer: its kernels are written for CUDA only.
            return Conflict("hardware.device is cpu, which has no kernels for quantized gathering", "use zero3")
        if target.frozen_type and self.quantized:
            return Conflict("the base model is quantized already (train.quantization)", "use zero3")
        if target.unpacks and self.stage == 3:
            # partitioned_param_coordinator.py, record_parameters: the copy that peft unpacks is not a parameter of its.
            return Conflict("train.method is qdora, which unpacks weights that are not gathered", "use fsdp or zero2")
        if target.frozen_type == "int8" and self.stage == 3:
            return Conflict(INT8_WHOLE, "set type: nf4, or strategy zero2")
        return self._lacking(target)

    def _lacking(self, target: Target) -> Conflict | None:
        """Return what a target lacks for quantized gradients or offload to disk; None if it has everything."""
        if self.quantized_gradients and (problem := gradients_unquantized(target, target.precision)):
            return Conflict(problem, "use zero3")
        if self.on_disk and not target.nvme:
            return Conflict(
                "hardware.nvme names no directory to move states to", "set hardware.nvme: /path/on/a/local/nvme"
            )
        return None

    @property
    def compiled(self) -> tuple[Compiled, ...]:
        disk: tuple[Compiled, ...] = ("async_io",) if self.on_disk else ()
        return (*disk, "quantizer") if self.quantized or self.quantized_gradients else disk

    def adding(self, target: Target, accumulation: int) -> Iterator[Reason]:
        """Yield the option that makes DeepSpeed add gradients in fp32; nothing where it need not, or cannot.

        At stage 0 it knows one type only, and at stage 1 it would take another optimizer for bf16 (engine.py,
        _do_optimizer_sanity_check), so training adds them itself (train/gradient_sums.py).
        """
        knows = self.stage >= 2 or (self.stage == 1 and self.optimizer != "gpu")
        if target.precision != "fp32" and accumulation > 1 and knows:
            why = "gradients of several micro-batches are added without rounding each sum to 16 bits"
            yield Reason("data_types.grad_accum_dtype", "fp32", why, f"{ENGINE}, get_data_types")

    def buckets(self, model: ModelSizes, on_gpu: bool) -> Buckets:
        if self.stage == 0:
            return Buckets()
        # A bucket larger than all gradients would be unused memory.
        reduce = max(1, min(model.trained, LARGEST_BUCKET))
        if self.stage < 3:
            return Buckets(reduce=reduce, allgather=reduce + reduce % ALIGNMENT)
        return Buckets(
            reduce=min(reduce, max(model.hidden * model.hidden, SMALLEST_BUCKET)),
            # One layer: gathering it takes as long as computing the one before. On NVMe prefetching fails.
            prefetch=0 if self.parameters == "nvme" else min(model.layer, LARGEST_BUCKET),
            # Norms, biases and adapters of a small rank stay gathered: gathering them would be all latency.
            persistence=10 * model.hidden,
            # The layer in use, the next one, and the largest module (the embedding or the head).
            live=min(model.total, 2 * model.layer + model.largest),
            overlap=on_gpu,
        )

    def options(self, buckets: Buckets, target: Target) -> Iterator[Reason]:
        """Yield the values of the DeepSpeed JSON with their reasons, except those that training's settings define."""
        yield from self._stage()
        if self.stage == 3:
            yield from self._stage_3_sizes(buckets)
        elif self.stage:
            yield from self._stage_1_2_sizes(buckets)
        if self.within_node:
            yield Reason(
                f"{ZERO}.zero_hpz_partition_size",
                target.ranks_per_node,
                "ranks of a node: the backward pass gathers weights inside it",
                "arXiv 2306.10209, 4.2; deepspeed/utils/groups.py, _create_zero_param_parallel_group",
            )
        if self.quantized:
            yield from _quantized(target)
        if self.quantized_gradients:
            yield Reason(
                f"{ZERO}.zero_quantized_gradients",
                True,
                "gradients are sent as int4 with scales, first inside each node, then their sums between nodes",
                "arXiv 2306.10209, 4.3; deepspeed/runtime/comm/coalesced_collectives.py, all_to_all_quant_reduce",
            )
        yield from self._offload("offload_optimizer", self.optimizer, buckets, target)
        yield from self._offload("offload_param", self.parameters, buckets, target)
        if self.on_disk:
            yield from aio_options()
        yield from torch_optimizer_options()

    def _stage(self) -> Iterator[Reason]:
        sharded = ("nothing", "optimizer states", "optimizer states, gradients", "weights, gradients, optimizer states")
        yield Reason(f"{ZERO}.stage", self.stage, f"sharded: {sharded[self.stage]}", "arXiv 1910.02054")
        if self.stage:
            yield Reason(
                f"{ZERO}.contiguous_gradients", True, "no fragmentation while gradients appear one by one", CONFIG
            )

    def _stage_1_2_sizes(self, buckets: Buckets) -> Iterator[Reason]:
        why = (
            "gradients are reduced during the backward pass"
            if buckets.overlap
            else "the adapter's gradients are too few to hide, and a second bucket costs memory; several times the "
            "two buckets have raced and given NaN"
        )
        yield Reason(f"{ZERO}.overlap_comm", buckets.overlap, why, "DeepSpeed#5545, #7188, #7965, #8061")
        yield size("reduce_bucket_size", buckets.reduce, "elements of gradients reduced together; more is never used")
        yield size("allgather_bucket_size", buckets.allgather, "elements of updated weights gathered together")

    def _stage_3_sizes(self, buckets: Buckets) -> Iterator[Reason]:
        coordinator = "deepspeed/runtime/zero/partitioned_param_coordinator.py"
        why = "weights and gradients move during computation" if buckets.overlap else "a CPU has no second stream"
        yield Reason(f"{ZERO}.overlap_comm", buckets.overlap, why, CONFIG)
        yield size("reduce_bucket_size", buckets.reduce, "elements of gradients reduced together; more is never used")
        if buckets.prefetch:
            yield size("stage3_prefetch_bucket_size", buckets.prefetch, "elements gathered ahead: about one layer")
        else:
            yield Reason(
                f"{ZERO}.stage3_prefetch_bucket_size",
                0,
                "prefetching fails with frozen weights on NVMe: 'already assigned swap buffer id'",
                "deepspeed/runtime/swap_tensor/partitioned_param_swapper.py",
            )
        yield size(
            "stage3_param_persistence_threshold", buckets.persistence, "smaller weights stay gathered on every rank"
        )
        yield size(
            "stage3_max_live_parameters",
            buckets.live,
            "the layer in use, the next one and the largest module; at 0 nothing is ever fetched ahead",
            f"{coordinator}, fetch_sub_module",
        )
        yield Reason(
            f"{ZERO}.stage3_max_reuse_distance",
            0,
            "above 0, each module scans the trace of all that follow; at 0 too, what prefetching has reached is kept",
            f"{coordinator}, __params_to_release",
        )
        yield Reason(
            f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
            False,
            "only the adapter is saved, and training gathers it itself",
            "trl#4416, peft#2892",
        )

    def _offload(self, key: str, placement: Placement, buckets: Buckets, target: Target) -> Iterator[Reason]:
        if placement == "gpu":
            return
        what = "master weights and moments" if key == "offload_optimizer" else "a rank's shard of the weights"
        yield Reason(f"{ZERO}.{key}.device", placement, f"where {what} lie between uses", OFFLOAD)
        pinned = target.device == "cuda"
        why = "copies from pinned memory run during computation" if pinned else "a CPU copies nothing to a device"
        yield Reason(f"{ZERO}.{key}.pin_memory", pinned, why, OFFLOAD)
        if placement == "nvme":
            yield Reason(f"{ZERO}.{key}.nvme_path", target.nvme, "hardware.nvme", OFFLOAD)
            yield from _nvme_buffers(key, buckets, target.ranks_per_node)

    def collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        if self.stage == 3:
            yield from self._stage_3_collectives(work, ranks_per_node)
            return
        # engine.py, allreduce_gradients: stages 0 and 1 reduce at the step's last micro-step, stage 2 at every one.
        # Stages 1 and 2 all-reduce whole buckets (stage_1_and_2.py, average_tensor and allreduce_and_scatter, with
        # use_multi_rank_bucket_allreduce at its default), so they send 2φ where a reduce-scatter would send φ. Counted.
        times = work.accumulation if self.stage == 2 else 1
        gradients = work.trainable * work.width
        yield Collective("all_reduce gradients", REDUCE, "all", times * gradients, times)
        if self.stage:
            # stage_1_and_2.py, step: all_gather_dp_groups. Counted.
            yield Collective("all_gather trained weights", GATHER, "all", gradients, 1)

    def _stage_3_collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        gathered, width = self.gathered(work), 1 if self.quantized else work.width
        calls = (2 + work.forwards_before) * work.modules * work.accumulation
        if self.within_node:
            # stage3.py, invalidate_secondary_tensor: a step makes only trained weights' second shards stale, and all
            # of them are there after the first use. So frozen weights cross the network once only.
            # Counted on 2 x 2 ranks: φ a step among all ranks, the rest among two.
            yield Collective("all_gather weights", GATHER, "all", work.trainable * width, work.modules, "first_forward")
            inside, of_node = (gathered - work.trainable) * width, calls - work.modules
            yield Collective("all_gather weights in a node", GATHER, "node", inside, of_node, "computation")
        else:
            yield Collective("all_gather weights", GATHER, "all", gathered * width, calls, "computation")
        if self.quantized_gradients:
            yield from _quantized_reduction(work, ranks_per_node)
            return
        # stage3.py, __avg_scatter_grads at every micro-step; at least hidden² elements each. Counted.
        buckets = math.ceil(work.trainable / (work.hidden * work.hidden))
        scattered = work.accumulation * work.trainable * work.width
        times = work.accumulation * buckets
        yield Collective("reduce_scatter gradients", SCATTER, "all", scattered, times, "computation", 1 / buckets)

    def gathered(self, work: StepWork) -> float:
        """Return the number of parameters that stage 3 gathers in one step over all micro-steps, counting every gather.

        2 (Ψ + φ) a micro-step, less what is still live when the backward pass begins (partitioned_param_coordinator.py,
        fetch_sub_module): counted 1.85-1.95, 1.95-2.1 and 2.0-2.15 Ψ with 0.17, 0.07 and 0.01 Ψ allowed live, and
        1.05-1.25 Ψ for models below the limit. Recomputation does not gather a third time, since a layer's backward
        pass already has its weights.
        """
        if self.stage < 3:
            return 0.0
        parameters = work.frozen + work.trainable
        before = work.forwards_before * parameters
        return work.accumulation * (before + 2 * parameters - min(parameters, work.live))

    def host_operations(self, work: StepWork) -> float:
        passes = work.forwards_before + (3 if work.checkpointing else 2)
        return HOOK_OPERATIONS * work.modules * passes if self.stage == 3 else 0.0


def gradients_unquantized(target: Target, sent: str) -> str | None:
    """Return why DeepSpeed would not quantize gradients that are sent in type `sent`, or would quantize other numbers;
    None if it would."""
    if target.device == "cpu":
        return "hardware.device is cpu, which has no kernels for it"
    if target.nodes == 1:  # stage3.py, __avg_scatter_grads: num_nodes > 1
        return "train.nodes is 1, and DeepSpeed quantizes gradients between nodes only"
    if sent != "fp16":  # csrc/quantization/pt_binding.cpp, ds_swizzle_quant: (__half*)input_vals.data_ptr()
        return f"gradients are sent in {sent}, and DeepSpeed's kernel reads them as fp16 whatever they are"
    return None


def _quantized_reduction(work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
    """Yield the exchanges of qgZ in one step (coalesced_collectives.py, all_to_all_quant_reduce): of each matrix, its
    numbers as int4 and an fp32 scale for each row or column, the larger number of them. Not counted in a run."""
    rows = work.trainable / work.hidden if work.kind == "full" else 2 * work.modules * work.hidden
    size = work.accumulation * (work.trainable / 2 + 4 * rows)
    calls = 2 * work.accumulation * work.modules * (1 if work.kind == "full" else 2)
    yield Collective("all_to_all gradients in a node", EXCHANGE, "node", size, calls, "computation")
    across = size / ranks_per_node
    yield Collective("all_to_all gradients between nodes", EXCHANGE, "across", across, calls, "computation")


def aio_options() -> Iterator[Reason]:
    """Yield the top-level `aio` section for NVMe; DeepSpeed refuses it inside zero_optimization (DeepSpeed#2721)."""
    source = "deepspeed/runtime/swap_tensor/constants.py"
    tune = "DeepSpeed's default; `ds_nvme_tune` measures which value suits a disk"
    yield Reason("aio.block_size", 1 << 20, f"bytes of one request: {tune}", source)
    yield Reason("aio.queue_depth", 8, f"requests under way: {tune}", source)
    # Threads widen the alignment of every swapped tensor: swap_tensor/partitioned_param_swapper.py, aligned_bytes.
    yield Reason("aio.intra_op_parallelism", 1, "one thread a request keeps the padding of each tensor small", source)
    yield Reason("aio.single_submit", False, "requests go to the kernel together", source)
    yield Reason("aio.overlap_events", True, "requests are submitted while others are waited for", source)


def _quantized(target: Target) -> Iterator[Reason]:
    yield Reason(
        f"{ZERO}.zero_quantized_weights", True, "weights are sent as int8 with scales", "arXiv 2306.10209, 4.1"
    )
    # stage3.py, quantize_nontrainable_params: asserts fp16. Without that call the key does nothing for weights that
    # were frozen after loading, as LoRA's are.
    half = target.precision == "fp16"
    yield Reason(
        f"{ZERO}.zero_quantized_nontrainable_weights",
        half,
        "frozen weights are kept as int8 too" if half else "DeepSpeed can keep frozen weights as int8 in fp16 only",
        "DeepSpeed#3954; deepspeed/runtime/zero/stage3.py, quantize_nontrainable_params",
    )


def torch_optimizer_options() -> Iterator[Reason]:
    """Yield the options that make DeepSpeed use the optimizer of train.optimizer."""
    compiled = "training has its own optimizer; DeepSpeed's would be compiled for minutes, and often fails to compile"
    untested = "DeepSpeed knows torch's AdamW, and refuses those of bitsandbytes and transformers without this"
    yield Reason("zero_allow_untested_optimizer", True, untested, "deepspeed/runtime/zero/utils.py; DeepSpeed#1127")
    yield Reason("zero_force_ds_cpu_optimizer", False, compiled, f"DeepSpeed#1127; {ENGINE}")
    yield Reason("steps_per_print", NEVER, "training shows its own progress", ENGINE)


def size(key: str, elements: int, reason: str, source: str = CONFIG) -> Reason:
    """Return a size of zero_optimization, in elements."""
    assert elements >= 1, f"{key} needs a size"
    return Reason(f"{ZERO}.{key}", elements, reason, source)


def _nvme_buffers(key: str, buckets: Buckets, ranks_per_node: int) -> Iterator[Reason]:
    if key == "offload_optimizer":
        yield Reason(f"{ZERO}.{key}.buffer_count", 4, "AdamW's weight, gradient and two moments", OFFLOAD)
        return
    yield Reason(
        f"{ZERO}.{key}.buffer_count",
        5,
        "one weight in use, others being read; with too few DeepSpeed fails",
        "DeepSpeed#3062",
    )
    yield size(
        f"{key}.buffer_size",
        -(-buckets.live // ranks_per_node),
        "elements; no weight's shard is larger than a rank's part of all live weights",
        "deepspeed/runtime/swap_tensor/partitioned_param_swapper.py",
    )
