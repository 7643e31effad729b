"""Host memory of one machine, phase by phase, over all its ranks."""

from typing import Any

from zerolora.memory import glibc_heap
from zerolora.memory.gpu import PlannedRun, TracedStep, largest_module
from zerolora.memory.states import BYTES

NVME_BUFFERS = 5  # offload_param.buffer_count (deepspeed/runtime/zero/offload_config.py)
TERMS = ("loading", "page_cache", "offload", "layer_inputs", "pinned", "saving", "ranks", "heap")


def terms(run: PlannedRun, step: TracedStep, on_gpu: dict[str, int]) -> dict[str, Any]:
    """Return the terms of one host in bytes, which add up to the total of the phase with the peak.

    `on_gpu`: totals of the phases on the GPU, without the reserve; with CPU ranks they are in host memory.
    """
    spec, local = run.spec, run.spec.ranks_per_node
    # Copies on one rank of the run, from which safetensors writes during training (train/engines/engine.py, part).
    saving = checkpoint_bytes(run)
    by_phase: dict[str, dict[str, float]] = {
        "loading": _loading(run),
        "step": {
            "offload": (offloaded(run) + stepping(run)) * local,
            "layer_inputs": step.offloaded * local,
            "pinned": _nvme_buffers(run),
            "saving": saving,
        },
        # Pinned blocks stay in their allocator's cache.
        "saving": {"offload": offloaded(run) * local, "layer_inputs": step.offloaded * local, "saving": saving},
    }
    if spec.on_cpu:
        heap = _free_in_heap(run, step)
        pages = _left_pages(run)
        for name, held in (("step", max(on_gpu.values())), ("saving", on_gpu["saving"])):
            by_phase[name] |= {"ranks": held * local, "heap": heap * local, "page_cache": pages * local}
    peak = max(by_phase, key=lambda name: sum(by_phase[name].values()))
    host: dict[str, Any] = {"processes": int(_process(run) + run.added.host) * local}
    host |= {name: int(by_phase[peak].get(name, 0)) for name in TERMS}
    host["total"] = sum(host.values())
    host["peak_phase"] = peak
    return host


def offloaded(run: PlannedRun) -> float:
    """Return the bytes of one rank that offload keeps on the host.

    DeepSpeed's, in addition to the states: 16-bit copies of the partition's weights (stages 1 and 2: stage_1_and_2.py,
    param_buffer_of_bit16_for_cpu_offload_groups) or gradients (stage3.py, grad_partitions_flat_buffer), and a buffer
    for the largest gradient in transfer (temp_grad_buffer_for_cpu_offload).
    """
    spec, parameters = run.spec, run.parameters
    if spec.layout.optimizer == "gpu":
        return 0.0
    if spec.layout.engine != "deepspeed":
        return run.states.host
    beside = parameters.trained * spec.width / spec.ranks
    if spec.layout.stage < 3:
        beside += parameters.largest_trained * spec.width
    return run.states.host + beside


def stepping(run: PlannedRun) -> float:
    """Return the bytes of one rank that an offloaded optimizer allocates and frees in a step: the partition's norm in
    fp64 (stage_1_and_2.py, complete_grad_norm_calculation_for_cpu_offload), AdamW's square root and quotient, or the
    copies of another optimizer."""
    if run.spec.layout.optimizer == "gpu":
        return 0.0
    share = run.parameters.trained / run.spec.ranks
    return max(8.0 * share, run.spec.optimizer.step_bytes(share, share, on_cpu=True))


def checkpoint_bytes(run: PlannedRun) -> float:
    """Return the bytes of a checkpoint: trained parameters in fp32, the optimizer's states, the best so far if kept."""
    adapters = BYTES["fp32"] * (1 + run.spec.keeps_best) * run.parameters.trained
    return adapters + run.spec.optimizer.saved_bytes(run.parameters)


def _loading(run: PlannedRun) -> dict[str, float]:
    """Return the bytes that reading the base model takes, over all ranks: "loading" is private memory of the processes,
    "page_cache" the pages of the weights' files, which ranks share and the system can reclaim."""
    spec, local = run.spec, run.spec.ranks_per_node
    stored = run.model.parameters * spec.width
    # Full fine-tuning freezes nothing, but reads as much.
    reading = run.parameters.frozen_bytes or stored
    if spec.on_cpu:
        if spec.layout.stage == 3:
            # The file is mapped, and counts; a lone rank's shard of a weight is as large as what it was gathered into.
            gathered = largest_module(run.model) * spec.width if spec.ranks == 1 else 0.0
            return {"loading": (reading + reading / spec.ranks + gathered) * local}
        return {"loading": reading * local}
    # Weights go to the GPU tensor by tensor, straight from the mapped file (train/base_model.py); a rank's own memory
    # on the host holds at most the largest. At stage 3 and with FSDP rank 0 alone reads, and sends the others theirs
    # (transformers/modeling_utils.py; train/engines/fsdp.py), unless it is to be quantized.
    readers = 1 if spec.layout.stage == 3 and not run.reads_whole else local
    in_transfer = largest_module(run.model) * spec.width * readers
    shards = reading / spec.ranks * local if spec.layout.parameters == "cpu" else 0.0
    # Once a weight's shard is on the host, its pages are not read again.
    return {"loading": in_transfer + shards, "page_cache": max(0.0, stored - shards)}


def _left_pages(run: PlannedRun) -> float:
    """Return the bytes of the weights' file that a CPU rank has read and then holds in another form. They stay resident
    until the system runs short: other weights are in the same mapping. A sharded rank has let go of it."""
    return float(run.spec.prepared_method.replaced(run.model) * run.spec.width) if run.spec.layout.stage < 3 else 0.0


def _nvme_buffers(run: PlannedRun) -> float:
    """Return the bytes of the buffers between NVMe and GPU (partitioned_param_swapper.py): render gives each rank's the
    size of its shard of the weights that may be gathered at once."""
    return float(NVME_BUFFERS * run.buckets.live * run.spec.width) if run.spec.layout.parameters == "nvme" else 0.0


def _process(run: PlannedRun) -> int:
    """Return the bytes of a rank's process beside its tensors."""
    if not run.spec.on_cpu:
        return glibc_heap.PROCESS
    zero = run.deepspeed_stage is not None and run.deepspeed_stage > 0
    return glibc_heap.CPU_PROCESS + glibc_heap.CPU_GROUP * (run.spec.ranks > 1) + glibc_heap.CPU_ZERO * zero


def _free_in_heap(run: PlannedRun, step: TracedStep) -> float:
    """Return the freed bytes in a CPU rank's heap that are still resident."""
    if run.spec.layout.stage < 3:
        return glibc_heap.SMALL_BLOCKS_SHARE * step.small_blocks
    fixed, share = glibc_heap.STAGE_3_HEAP[run.spec.activation_checkpointing]
    free = fixed + share * run.model.parameters * run.spec.width
    return free if run.spec.ranks > 1 else free / 2  # one rank alone gathers nothing
