"""Stage estimate: predicts the bytes of every strategy on GPU, host and disk.

    zerolora estimate --settings JSON --model resources/models/MODEL --packing results/NAME/packing
                      --output results/NAME/estimate.json

It needs config.json, the longest packed row and the settings, but neither weights nor a GPU nor torch.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerolora.config.settings import EstimateSettings
from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.memory.headroom import asked
from zerolora.memory.model_spec import ModelSpec, to_json
from zerolora.memory.predict import Prediction, predict
from zerolora.memory.read_spec import read_model_spec
from zerolora.memory.row_statistics import RowStatistics, row_statistics
from zerolora.memory.sources import SOURCES
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.lora import LoraMethod
from zerolora.strategies import STRATEGIES
from zerolora.strategies.base import Target
from zerolora.types import Attention
from zerolora.units import gib

BUILT_IN_ATTENTION = ("falcon", "t5")  # families whose attention cannot be replaced in transformers
SUMS = ("model_states", "total", "peak_phase")  # entries of a term table that are not terms


@dataclass(frozen=True)
class Capacity:
    """The memory of a machine, in bytes."""

    gpu: int | None
    """Memory of one GPU; None if ranks compute on the CPU."""
    host: int


def estimate(settings: EstimateSettings, model: Path, packing: Path) -> dict[str, Any]:
    """Return the estimate of every strategy for a run's settings, model directory and packing plan, in bytes.

    Reads only config.json and stats.json. Raises UserError if they are missing or incomplete.
    """
    model_spec = read_model_spec(model)
    stats = read_json(packing / "stats.json", "zerolora pack")
    if "most_supervised" not in stats:
        raise UserError(f"{packing / 'stats.json'}: is of another version; run `zerolora pack` again")
    rows = row_statistics(stats)
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
    """Return the spec of a run, from its settings and its packing plan.

    Settings left open get the value that takes the least memory.
    """
    targets = settings.lora.targets
    micro_batch = settings.micro_batch or 1
    on_cpu = settings.device == "cpu"
    return TrainingSpec(
        strategy="zero0",
        method=LoraMethod(
            r=settings.lora.r,
            targets=targets if isinstance(targets, str) else tuple(targets),
            dropout=settings.lora.dropout,
        ),
        nodes=settings.nodes,
        ranks_per_node=settings.ranks_per_node,
        micro_batch=micro_batch,
        accumulation=settings.global_batch // (micro_batch * settings.world_size),
        length=rows.longest_packed_row,
        activation_checkpointing=settings.activation_checkpointing is not False,
        attention=settings.attention or attentions(model)[0],
        precision=settings.precision,
        masked=masked(rows, micro_batch),
        # For an unknown family, training may have to compute all logits at once (train/isolation.py).
        loss="fused" if model.counted == "config.json" else "full",
        logits=rows.most_supervised,
        on_cpu=on_cpu,
        keeps_best=settings.keeps_best,
        reserve=0 if on_cpu else settings.reserve,
    )


def attentions(model: ModelSpec) -> tuple[Attention, ...]:
    """Return the attention implementations that a model certainly supports, the fastest first."""
    if model.family in BUILT_IN_ATTENTION or model.counted != "config.json":
        return ("sdpa", "eager")
    return ("eager",) if model.softcap_attention or model.family == "bloom" else ("flash", "sdpa", "eager")


def masked(rows: RowStatistics, micro_batch: int) -> bool:
    """Return whether attention gets a mask, which separates packed rows and marks padding; a single row needs none."""
    return rows.packing or micro_batch > 1


def estimates(model: ModelSpec, spec: TrainingSpec, capacity: Capacity, names: list[str]) -> list[dict[str, Any]]:
    """Return `{"strategy", "gpu", "host", "disk", "fits", "why", …}` of each named strategy, in bytes."""
    return [estimated(model, replace(spec, strategy=name), capacity) for name in names]


def estimated(model: ModelSpec, spec: TrainingSpec, capacity: Capacity) -> dict[str, Any]:
    """Return the estimate of one spec, with its largest term and the changes that would lower the total."""
    prediction = predict(model, spec)
    fault = impossible(spec) or too_large(prediction, capacity)
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
        "would_lower": remedies(model, spec, prediction.gpu["total"]),
        "counted_from": model.counted,
    }


def impossible(spec: TrainingSpec) -> str | None:
    """Return why a strategy cannot run on this hardware, None if it can."""
    target = Target(
        device="cpu" if spec.on_cpu else "cuda",
        precision=spec.precision,
        nodes=spec.nodes,
        ranks_per_node=spec.ranks_per_node,
        nvme="assumed",  # which directory a run has is checked by the planner
    )
    if conflict := spec.layout.conflict(target):
        return conflict.problem
    if spec.layout.within_node and spec.ranks_per_node == 1:
        return "a node has one rank: there is nothing to shard inside it"
    return None


def too_large(prediction: Prediction, capacity: Capacity) -> str | None:
    """Return which memory is too small, None if everything fits."""
    gpu, host = prediction.gpu["total"], asked(prediction.host["total"])
    if capacity.gpu is not None and gpu > capacity.gpu:
        return f"needs {gib(gpu)} of a GPU's {gib(capacity.gpu)}"
    if host > capacity.host:
        return f"needs {gib(host)} of a host's {gib(capacity.host)}, headroom included"
    return None


def remedies(model: ModelSpec, spec: TrainingSpec, total: int) -> list[dict[str, Any]]:
    """Return changes that lower a GPU's total, each applied on its own, most effective first: `{"change", "total"}`."""
    tried: list[tuple[str, TrainingSpec]] = []
    if not spec.activation_checkpointing:
        tried.append(("activation checkpointing", replace(spec, activation_checkpointing=True)))
    if spec.micro_batch > 1:
        tried.append(("micro-batch 1", replace(spec, micro_batch=1)))
    if spec.attention != attentions(model)[0]:
        best = attentions(model)[0]
        tried.append((f"attention {best}", replace(spec, attention=best)))
    if spec.loss == "full":
        tried.append(("a fused loss", replace(spec, loss="fused")))
    if spec.layout.stage < 3 and spec.ranks > 1:
        tried.append(("zero3", replace(spec, strategy="zero3", own=None, buckets=None)))
    if spec.layout.parameters == "gpu" and not spec.on_cpu:
        tried.append(("zero3_offload", replace(spec, strategy="zero3_offload", own=None, buckets=None)))
    lower = [{"change": name, "total": predict(model, other).gpu["total"]} for name, other in tried]
    return sorted((each for each in lower if each["total"] < total), key=lambda each: each["total"])
