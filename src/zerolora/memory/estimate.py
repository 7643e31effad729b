"""Stage estimate: predicts the bytes of every strategy on GPU, host and disk.

    zerolora stage estimate ESTIMATED

It reads config.json, the statistics of the packing plan and the settings, and needs neither weights, a GPU nor torch.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerolora.config.settings import EstimateSettings
from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.memory.notes import notes
from zerolora.memory.predict import Prediction, predict
from zerolora.memory.reserve import with_headroom
from zerolora.memory.training_spec import RowStatistics, TrainingSpec, row_statistics
from zerolora.methods.registry import create
from zerolora.model import fused_kernels
from zerolora.model.attention_kernels import has_flash
from zerolora.model.padded_lengths import padded, step_of
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import ModelSpec, to_json, with_rows
from zerolora.optimizers import OPTIMIZERS
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Target
from zerolora.train.objectives import OBJECTIVES
from zerolora.types import Attention
from zerolora.units import gib

SUMS = ("model_states", "reserve", "total", "needed", "peak_phase")  # entries beside the terms


@dataclass(frozen=True)
class Capacity:
    """The memory of a machine, in bytes."""

    gpu: int | None
    """Memory of one GPU; None if ranks compute on the CPU."""
    host: int


def estimate(settings: EstimateSettings, model: Path, packing: Path) -> dict[str, Any]:
    """Return the estimate of every strategy for a run's settings, model directory and packing plan, in bytes.

    Raises UserError if config.json or stats.json is missing or incomplete.
    """
    model_spec = with_rows(read_model_spec(model), settings.added_tokens)
    try:
        rows = row_statistics(read_json(packing / "stats.json", "zerolora stage pack"))
    except (KeyError, TypeError):
        raise UserError(
            f"{packing / 'stats.json'}: was written by another version; run `zerolora stage pack` again"
        ) from None
    spec = training_spec(model_spec, settings, rows)
    parameters = spec.parameters(model_spec)
    capacity = Capacity(settings.gpu_memory, settings.host_memory)
    return {
        "model": {
            "frozen_parameters": parameters.frozen,
            "trainable_parameters": parameters.trained,
            "counted_from": model_spec.counted,
        },
        "data": asdict(rows),
        "micro_batch": spec.micro_batch,
        "capacity": {"gpu": capacity.gpu, "host": capacity.host},
        "strategies": estimates(model_spec, spec, capacity, list(STRATEGIES)),
        "sources": SOURCES,
        "shape": to_json(model_spec),
    }


def training_spec(model: ModelSpec, settings: EstimateSettings, rows: RowStatistics) -> TrainingSpec:
    """Return the spec of a run; open settings get the value that takes the least memory.

    Raises UserError if ranks cannot share rows of the model.
    """
    check_sharing(model, settings.sequence_parallel, world_size(settings), "train.sequence_parallel")
    objective = OBJECTIVES[settings.objective].configured(settings.objective_settings)
    micro_batch = settings.micro_batch or 1
    on_cpu, longest = settings.device == "cpu", rows.longest_packed_row
    return TrainingSpec(
        strategy="zero0",
        method=create(settings.method.name, **{**settings.method.settings, "added_tokens": settings.added_tokens}),
        nodes=settings.nodes,
        ranks_per_node=settings.ranks_per_node,
        micro_batch=micro_batch,
        accumulation=settings.global_batch // (micro_batch * data_ranks(settings)),
        length=padded(longest, step_of(longest)) if settings.compile else longest,
        compiles=settings.compile,
        activation_checkpointing=settings.activation_offload or settings.activation_checkpointing is not False,
        activation_offload=settings.activation_offload,
        attention=open_attentions(model, settings)[0],
        precision=settings.precision,
        kernels=objective.kernels(
            fused_kernels.used(settings.kernels, settings.device, model.family, model.activation)
        ),
        masked=masked(rows, micro_batch * len(objective.texts)),
        # Training may have to compute all logits of an unknown family at once (train/isolation.py).
        loss="fused" if model.counted == "config.json" else "full",
        logits=0 if objective.every_token else rows.most_supervised,
        on_cpu=on_cpu,
        keeps_best=settings.keeps_best,
        keep_checkpoints=settings.keep_checkpoints,
        reserve=settings.reserve,
        sequence_parallel=settings.sequence_parallel,
        capability=settings.compute_capability,
        objective=objective,
        optimizer=OPTIMIZERS[settings.optimizer],
        packed=rows.packed(len(objective.texts)),
        all_supervised=rows.supervised_tokens + rows.validation_supervised_tokens,
    )


def world_size(settings: EstimateSettings) -> int:
    """Return the number of ranks."""
    return settings.nodes * settings.ranks_per_node


def data_ranks(settings: EstimateSettings) -> int:
    """Return the number of ranks, or of groups that share rows, that divide a global batch."""
    return world_size(settings) // settings.sequence_parallel


def check_sharing(model: ModelSpec, shared: int, ranks: int, key: str) -> None:
    """Raise UserError unless the model's heads can be divided among `shared` ranks, in flash attention. `key` is the
    setting in the message."""
    if shared == 1:
        return
    if "flash" not in model.attentions:
        raise UserError(
            f"{key} is {shared}, which needs flash attention, and this {model.family} model has none; use 1"
        )
    if model.heads % shared or model.key_heads % shared:
        possible = [
            str(each)
            for each in range(1, min(ranks, model.key_heads) + 1)
            if not any(number % each for number in (model.heads, model.key_heads, ranks))
        ]
        raise UserError(
            f"{key} is {shared}, but the model has {model.heads} heads and {model.key_heads} "
            f"key-value heads, to be divided among so many ranks; use {' or '.join(possible)}"
        )


def open_attentions(model: ModelSpec, settings: EstimateSettings) -> tuple[Attention, ...]:
    """Return the implementations of attention that the settings allow, the fastest first."""
    if settings.sequence_parallel > 1:
        return ("flash",)
    return model.attentions if settings.attention is None else (settings.attention,)


def masked(rows: RowStatistics, micro_batch: int) -> bool:
    """Return whether attention needs a mask, for packed rows or for padding."""
    return rows.packing or micro_batch > 1


def estimates(model: ModelSpec, spec: TrainingSpec, capacity: Capacity, names: list[str]) -> list[dict[str, Any]]:
    """Return `{"strategy", "gpu", "host", "disk", "fits", "why", …}` of each named strategy, in bytes."""
    return [estimated(model, replace(spec, strategy=name), capacity) for name in names]


def estimated(model: ModelSpec, spec: TrainingSpec, capacity: Capacity, changes: bool = True) -> dict[str, Any]:
    """Return the estimate of one spec, with its largest term and, with `changes`, those that would lower the total: a
    model without a table may be traced for them."""
    prediction = predict(model, spec)
    fault = fault_of(model, spec, capacity)
    terms = {name: value for name, value in prediction.gpu.items() if name not in SUMS}
    return {
        "strategy": spec.strategy,
        "gpu": prediction.gpu,
        "host": prediction.host,
        "disk": prediction.disk,
        "phases": prediction.phases,
        "fits": fault is None,
        "why": fault or "fits",
        "dominates": max(terms, key=lambda name: terms[name]),
        **({"would_lower": remedies(model, spec, prediction.gpu["total"])} if changes else {}),
        "counted_from": model.counted,
        "notes": notes(model, spec),
    }


def fault_of(model: ModelSpec, spec: TrainingSpec, capacity: Capacity) -> str | None:
    """Return why a spec cannot run on this hardware or does not fit; None if it fits."""
    return impossible(spec, model) or too_large(predict(model, spec), capacity)


def _attention_fault(spec: TrainingSpec, model: ModelSpec) -> str | None:
    if spec.attention not in model.attentions:
        return f"a {model.family} has no {spec.attention} attention; use {' or '.join(model.attentions)}"
    flash_sinks = spec.attention == "flash" and model.sinks and not spec.on_cpu
    if flash_sinks and not has_flash(model, "flash", spec.capability, spec.precision != "fp32", False):
        return f"no kernel computes the sinks of a {model.family} with flash attention on this GPU; use eager"
    return None


def impossible(spec: TrainingSpec, model: ModelSpec) -> str | None:
    """Return why a spec cannot run on this hardware, whatever its memory; None if it can."""
    if fault := _attention_fault(spec, model):
        return fault
    target = target_of(spec, nvme="assumed")  # the planner checks the run's directory
    if conflict := spec.layout.conflict(target) or spec.optimizer.conflict(spec.layout, target):
        return conflict.problem
    if spec.compiles and spec.layout.stage == 3 and spec.layout.engine == "deepspeed":
        return "DeepSpeed gathers weights inside a layer, which train.compile compiles as a whole; set compile: false"
    if spec.compiles and model.experts:
        return f"the experts of a {model.family} are not compiled; set train.compile: false"
    if spec.layout.within_node and spec.ranks_per_node == 1:
        return "a node has one rank: there is nothing to shard inside it"
    return None


def target_of(spec: TrainingSpec, nvme: str | None) -> Target:
    """Return the hardware of a spec; `nvme` is the directory for offloaded states."""
    return Target(
        device="cpu" if spec.on_cpu else "cuda",
        precision=spec.precision,
        nodes=spec.nodes,
        ranks_per_node=spec.ranks_per_node,
        nvme=nvme,
        frozen_type=spec.method.frozen_type,
        unpacks=spec.method.unpacks,
    )


def too_large(prediction: Prediction, capacity: Capacity) -> str | None:
    """Return which memory is too small; None if everything fits."""
    gpu, host = prediction.gpu["total"], with_headroom(prediction.host["needed"])
    if capacity.gpu is not None and gpu > capacity.gpu:
        return f"needs {gib(gpu)} of a GPU's {gib(capacity.gpu)}"
    if host > capacity.host:
        return f"needs {gib(host)} of a host's {gib(capacity.host)}, headroom included"
    return None


def remedies(model: ModelSpec, spec: TrainingSpec, total: int) -> list[dict[str, Any]]:
    """Return each change that by itself lowers a GPU's total, the most effective first: `{"change", "total"}`."""
    lower = [
        {"change": name, "total": predict(model, other).gpu["total"]}
        for name, other in (*settings_changes(model, spec), *strategy_changes(spec))
        if impossible(other, model) is None
    ]
    return sorted((each for each in lower if each["total"] < total), key=lambda each: each["total"])


def settings_changes(model: ModelSpec, spec: TrainingSpec) -> list[tuple[str, TrainingSpec]]:
    """Return changes of training's settings that may lower a GPU's total, by name."""
    tried: list[tuple[str, TrainingSpec]] = []
    if not spec.activation_checkpointing:
        tried.append(("activation checkpointing", replace(spec, activation_checkpointing=True)))
    if spec.micro_batch > 1:
        tried.append(("micro-batch 1", replace(spec, micro_batch=1)))
    best = model.attentions[0]
    if spec.attention != best and spec.sequence_parallel == 1:
        tried.append((f"attention {best}", replace(spec, attention=best)))
    if spec.loss == "full":
        tried.append(("a fused loss", replace(spec, loss="fused")))
    return tried


def strategy_changes(spec: TrainingSpec) -> list[tuple[str, TrainingSpec]]:
    """Return strategies that may lower a GPU's total, by name."""
    tried: list[tuple[str, TrainingSpec]] = []
    if spec.layout.stage < 3 and spec.ranks > 1:
        tried.append(("zero3", replace(spec, strategy="zero3", own=None, buckets=None)))
    if spec.layout.parameters == "gpu" and not spec.on_cpu:
        tried.append(("zero3_offload", replace(spec, strategy="zero3_offload", own=None, buckets=None)))
    return tried


SOURCES = {
    "frozen_weights": "2 or 4 bytes a parameter, 4 bits for QLoRA; sharded at stage 3 "
    "(arXiv 1910.02054 section 3; 2305.14314 section 3)",
    "quantization_constants": "maxima of blocks of 64 weights, in fp32, or in 8 bits with constants of their own "
    "(arXiv 2305.14314 section 3); attributes of modules, so that no engine shards or offloads them "
    "(bitsandbytes/nn/modules.py, Linear4bit)",
    "trained_weights": "φ parameters: arXiv 2106.09685 section 4.1, 2402.09353, 2205.05638",
    "gradients": "2 bytes of each trained parameter, 4 without DeepSpeed; sharded from stage 2 (arXiv 1910.02054)",
    "master": "4 bytes of each trained parameter; sharded from stage 1 (arXiv 1910.02054)",
    "moments": "8 bytes of each trained parameter; sharded from stage 1 (arXiv 1910.02054)",
    "activations": "what the step's operations save and allocate (zerolora/memory/decoder.py), at the peak; less the "
    "gradients that are not computed yet",
    "logits": "logits, their fp32 copy, log-softmax and gradients (transformers/loss/loss_utils.py), at the peak",
    "buffers": "buckets, gathered weights, norms: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py, "
    "partitioned_param_coordinator.py",
    "reserve": "memory beside the model's tensors: estimate.reserve, or the shares below (zerolora/memory/reserve.py)",
    "reserve_context": "CUDA's context, 426 MiB: unslothai/unsloth-zoo#1053; from compute capability 9.0 527 MiB, "
    "measured (docs/memory.md, The reserve)",
    "reserve_nccl": "12 MiB for each of 32 channels of a group of several ranks: NVIDIA/nccl#1685, NVIDIA/nccl#986; "
    "from compute capability 9.0 also 652 MiB of NCCL's own, measured",
    "reserve_kernels": "kernels that training loads: 540 MiB from compute capability 9.0, measured",
    "reserve_workspaces": "two of cuBLAS: ATen/cuda/CublasHandlePool.cpp",
    "reserve_allocator": "a margin of 2.6 % of the tensors, as the lowest prediction on a GPU was so much too low "
    "(docs/memory.md, Validation); torch's allocator reserves as much: vllm-project/compressed-tensors#587",
    "reserve_streams": "the most that the stream which gathers weights needs, beyond its part at the peak: "
    "partitioned_param_coordinator.py, _fsdp_collectives.py, CUDACachingAllocator.cpp",
    "teacher": "6 bytes for each of the k tokens and 8 more, for each supervised token of train and validation: "
    "train/objectives/distill.py",
    "processes": "a rank that has loaded nothing: benchmarks/process_memory.py",
    "loading": "the largest weight, in transfer to the GPU, and shards that stay on the host; on CPU ranks the "
    "weights: train/base_model.py",
    "page_cache": "pages of the weights' files, mapped (safetensors) and shared by a node's ranks: docs/speed.md",
    "offload": "states and buffers: stage_1_and_2.py, stage3.py",
    "layer_inputs": "with activation_offload: each layer's input, in pinned blocks of a power of two: "
    "train/activation_offload.py, ATen/core/CachingHostAllocator.h",
    "pinned": "buffers between NVMe and GPU: partitioned_param_swapper.py",
    "ranks": "on CPU ranks: what would be in GPU memory",
    "heap": "free blocks of a CPU rank's heap: measured, benchmarks/memory/measure.py",
    "saving": "the copies that a checkpoint is written from: train/engines/engine.py, train/checkpoint/store.py",
}
