"""Host memory of one machine, phase by phase, over all its ranks; and the disk space of a run."""

from typing import Any

from zerolora.memory.gpu import PlannedRun, TracedStep, largest_module, quantizing
from zerolora.memory.states import BYTES

NVME_BUFFERS = 5  # offload_param.buffer_count (deepspeed/runtime/zero/offload_config.py)
TERMS = ("loading", "page_cache", "offload", "layer_inputs", "pinned", "saving", "ranks", "heap")

# Measured on a 2-core AMD EPYC VM with glibc 2.36, Python 3.11 and torch 2.13 (CPU build); their accuracy on other
# machines is unknown. PROCESS: benchmarks/process_memory.py; the others: fitted to benchmarks/results/memory_cpu.json
# (benchmarks/memory/measure.py).
PROCESS = 431 * 1024**2
"""Bytes of a rank that has imported torch, deepspeed, transformers, peft and datasets and loaded nothing."""
CPU_PROCESS = 508 * 1024**2
"""Bytes of a CPU rank beside its tensors, after steps with rows of many lengths."""
CPU_GROUP = 67 * 1024**2
"""Additional bytes of a CPU rank that communicates with others."""
CPU_ZERO = 46 * 1024**2
"""Additional bytes of a CPU rank from ZeRO stage 1 on."""
DEQUANTIZING = 2**29
"""Bytes of a rank that dequantizes weights as it loads them, beside the weight: the most that a fetch of MXFP4 experts
of the size of gpt-oss's (16.6 million numbers each) held beyond its imports."""
SMALL_BLOCKS_SHARE = 0.15
"""Share of the peak of small blocks (tracer.py, SMALL) that stays in the heap after it is freed."""
STAGE_3_HEAP = {True: (48 * 1024**2, 0.09), False: (0, 0.4)}
"""Freed memory of gathered weights that stays in the heap of a CPU rank under stage 3: bytes, and share of the model's
bytes, with and without activation checkpointing."""


def terms(run: PlannedRun, step: TracedStep, on_gpu: dict[str, int]) -> dict[str, Any]:
    """Return the terms of one host in bytes, which add up to the total of the peak phase, and "needed": the most of any
    phase without "page_cache", which the system drops where memory is short.

    `on_gpu`: totals of the GPU's phases without the reserve, which CPU ranks have in host memory.
    """
    spec, local = run.spec, run.spec.ranks_per_node
    # One rank's copies, from which safetensors writes during training (train/engines/engine.py, part).
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
    without = max(sum(values.values()) - values.get("page_cache", 0) for values in by_phase.values())
    host["needed"] = host["processes"] + int(without)
    host["peak_phase"] = peak
    return host


def offloaded(run: PlannedRun) -> float:
    """Return the bytes of one rank that offload keeps on the host.

    Beside the states, DeepSpeed keeps 16-bit copies of the partition's weights (stages 1 and 2: stage_1_and_2.py,
    param_buffer_of_bit16_for_cpu_offload_groups) or gradients (stage3.py, grad_partitions_flat_buffer), and a buffer
    for the largest gradient in transfer (temp_grad_buffer_for_cpu_offload).
    """
    spec, parameters = run.spec, run.parameters
    if spec.layout.optimizer == "gpu":
        return 0.0
    if spec.layout.engine != "deepspeed":
        return run.states.host
    gathers = spec.layout.stage < 3
    beside = parameters.trained * (spec.width if gathers else run.gradient_width) / spec.ranks
    if gathers:
        beside += parameters.largest_trained * spec.width
    return run.states.host + beside


def stepping(run: PlannedRun) -> float:
    """Return the bytes of one rank that an offloaded optimizer allocates and frees in a step: the partition's norm in
    fp64 (stage_1_and_2.py, complete_grad_norm_calculation_for_cpu_offload), or the optimizer's temporaries."""
    if run.spec.layout.optimizer == "gpu":
        return 0.0
    share = run.parameters.trained / run.spec.ranks
    return max(8.0 * share, run.spec.optimizer.step_bytes(share, share, on_cpu=True))


def checkpoint_bytes(run: PlannedRun) -> float:
    """Return the bytes of a checkpoint: fp32 trained parameters, optimizer states, and the best adapter if kept."""
    adapters = BYTES["fp32"] * (1 + run.spec.keeps_best) * run.parameters.trained
    return adapters + run.spec.optimizer.saved_bytes(run.parameters)


def _loading(run: PlannedRun) -> dict[str, float]:
    """Return the bytes of reading the base model, over all ranks: "loading" is private memory of the processes,
    "page_cache" pages of the weight files, shared by ranks and reclaimable."""
    spec, local = run.spec, run.spec.ranks_per_node
    stored = run.model.parameters * spec.width
    # Full fine-tuning has no frozen bytes, but reads as much.
    reading = run.parameters.frozen_bytes or stored
    if spec.on_cpu:
        if spec.layout.stage == 3 and spec.method.frozen_type is not None and not run.quantizes_whole:
            constants = run.parameters.constants
            return {"loading": (stored + (reading - constants) / spec.ranks + constants + quantizing(run)) * local}
        if spec.layout.stage == 3:
            # The mapped file counts; a lone rank's shard is as large as the gathered weight.
            gathered = largest_module(run.model) * spec.width if spec.ranks == 1 else 0.0
            return {"loading": (reading + reading / spec.ranks + gathered) * local}
        return {"loading": reading * local}
    # Weights go to the GPU tensor by tensor, straight from the mapped file (train/base_model.py), so a rank's host
    # memory has at most the largest. At stage 3 and with FSDP only rank 0 reads, and sends the other ranks their shards
    # (transformers/modeling_utils.py; train/engines/fsdp.py), unless weights are quantized, which all ranks read.
    readers = 1 if spec.layout.stage == 3 and spec.method.frozen_type is None else local
    working = DEQUANTIZING if run.model.stored_bytes else 0
    in_transfer = (largest_module(run.model) * spec.width + working) * readers
    shards = (reading - run.parameters.constants) / spec.ranks * local if spec.layout.parameters == "cpu" else 0.0
    # Pages of a weight whose shard is on the host are not read again.
    return {"loading": in_transfer + shards, "page_cache": max(0.0, stored - shards)}


def _left_pages(run: PlannedRun) -> float:
    """Return the bytes of the weight file that a CPU rank has read and replaced by another form. Its pages stay
    resident while other weights use the mapping; a sharded rank has closed it."""
    return float(run.spec.prepared_method.replaced(run.model) * run.spec.width) if run.spec.layout.stage < 3 else 0.0


def _nvme_buffers(run: PlannedRun) -> float:
    """Return the bytes of the buffers between NVMe and GPU (partitioned_param_swapper.py). Each of a rank's buffers has
    the size of its shard of the weights that may be gathered at once."""
    return float(NVME_BUFFERS * run.buckets.live * run.spec.width) if run.spec.layout.parameters == "nvme" else 0.0


def _process(run: PlannedRun) -> int:
    if not run.spec.on_cpu:
        return PROCESS
    zero = run.deepspeed_stage is not None and run.deepspeed_stage > 0
    return CPU_PROCESS + CPU_GROUP * (run.spec.ranks > 1) + CPU_ZERO * zero


def _free_in_heap(run: PlannedRun, step: TracedStep) -> float:
    """Return the freed bytes of a CPU rank's heap that stay resident."""
    if run.spec.layout.stage < 3:
        return SMALL_BLOCKS_SHARE * step.small_blocks
    fixed, share = STAGE_3_HEAP[run.spec.activation_checkpointing]
    free = fixed + share * run.model.parameters * run.spec.width
    return free if run.spec.ranks > 1 else free / 2  # a lone rank gathers nothing


def disk_terms(run: PlannedRun) -> dict[str, int]:
    """Return the terms of the disk space in bytes; `nvme`: states that a node offloads."""
    model, parameters = run.model.parameters * run.spec.width, run.parameters
    disk = {
        "model": run.model.stored_bytes or model,
        "adapter": parameters.trained * BYTES["fp32"],
        "checkpoints": int((run.spec.keep_checkpoints + run.spec.keeps_best) * checkpoint_bytes(run)),
        "merged": model,
        "nvme": int(run.states.disk * run.spec.ranks_per_node),
    }
    if of_teacher := run.spec.objective.row_bytes(run.spec.all_supervised):
        disk["teacher"] = of_teacher
    return {**disk, "total": sum(disk.values())}
