"""Stage estimate: the bytes of every strategy on GPU, host and disk, before anything runs.

    zerolora estimate --model DIRECTORY --strategy all --nodes 2 --gpus-per-node 8 --gpu-memory 80GiB …
    zerolora estimate --settings JSON --model resources/models/MODEL --packing results/NAME/packing
                      --output results/NAME/estimate.json

Neither weights nor a GPU nor torch is needed: config.json, the data's longest packed row and the plan are enough.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.memory.adapters import Finetuning, weights
from zerolora.memory.headroom import asked
from zerolora.memory.model_spec import ModelSpec, read_model_spec, to_json
from zerolora.memory.predict import Plan, Prediction, predict
from zerolora.memory.sources import SOURCES
from zerolora.memory.states import BYTES
from zerolora.strategies import STRATEGIES
from zerolora.types import Attention
from zerolora.units import GIB, gib

BAR = 20  # characters
BUILT_IN_ATTENTION = ("falcon", "t5")  # transformers has not made theirs replaceable


@dataclass(frozen=True)
class Capacity:
    """What there is, in bytes."""

    gpu: int | None
    """One GPU's memory; None where ranks compute on the CPU."""
    host: int


def estimate(settings: dict[str, Any], model: Path, packing: Path) -> dict[str, Any]:
    """Return the estimate of every strategy for a run's settings, model directory and packing plan, in bytes.

    Only config.json and stats.json are read. Raises UserError if they are missing or say too little.
    """
    shape = read_model_spec(model)
    stats = read_json(packing / "stats.json", "zerolora pack")
    if "most_supervised" not in stats:
        raise UserError(f"{packing / 'stats.json'}: is of another version; run `zerolora pack` again")
    data = data_of(stats)
    plan = plan_of(shape, settings, data)
    what = weights(shape, plan.finetuning, BYTES[plan.precision])
    capacity = Capacity(settings["gpu_memory"], settings["host_memory"])
    return {
        "model": {
            "frozen_parameters": what.frozen,
            "trainable_parameters": what.trained,
            "counted_from": shape.counted,
        },
        "data": data,
        "micro_batch": plan.micro_batch,
        "capacity": {"gpu": capacity.gpu, "host": capacity.host},
        "strategies": estimates(shape, plan, capacity, list(STRATEGIES)),
        "sources": SOURCES,
        "shape": to_json(shape),
    }


def data_of(stats: dict[str, Any]) -> dict[str, Any]:
    """Return what memory and time depend on of a packing plan: lengths in tokens, and how many packed rows."""
    return {
        "packing": stats["packing"],
        "longest_packed_row": stats["longest_packed_row"],
        "most_supervised": stats["most_supervised"],
        "packed_rows": stats["train_packed_rows"],
        "tokens": stats["train_tokens"],
        "supervised_tokens": stats["train_supervised_tokens"],
        "mean_row_of_a_token": stats["train_mean_row_of_a_token"],
        "validation_rows": stats["validation_packed_rows"],
    }


def plan_of(shape: ModelSpec, settings: dict[str, Any], data: dict[str, Any]) -> Plan:
    """Return the plan of a run: its settings, and what data_of says. Of what is open, the least is taken."""
    lora = settings["lora"]
    targets = lora["targets"]
    micro_batch = settings["micro_batch"] or 1
    on_cpu = settings["device"] == "cpu"
    return Plan(
        strategy="zero0",
        finetuning=Finetuning(
            r=lora["r"],
            targets=targets if isinstance(targets, str) else tuple(targets),
            dropout=lora["dropout"],
        ),
        nodes=settings["nodes"],
        ranks_per_node=settings["ranks_per_node"],
        micro_batch=micro_batch,
        accumulation=settings["global_batch"] // (micro_batch * settings["nodes"] * settings["ranks_per_node"]),
        length=data["longest_packed_row"],
        activation_checkpointing=settings["activation_checkpointing"] is not False,
        attention=settings["attention"] or attentions(shape)[0],
        precision=settings["precision"],
        masked=masked(data, micro_batch),
        # Of a family that is not in the table, training may have to make all logits at once (train/isolation.py).
        loss="fused" if shape.counted == "config.json" else "full",
        logits=data["most_supervised"],
        on_cpu=on_cpu,
        keeps_best=settings["keeps_best"],
        reserve=0 if on_cpu else settings["reserve"],
    )


def attentions(shape: ModelSpec) -> tuple[Attention, ...]:
    """Return the implementations of attention that a model surely has, the fastest first."""
    if shape.family in BUILT_IN_ATTENTION or shape.counted != "config.json":
        return ("sdpa", "eager")
    return ("eager",) if shape.softcap_attention or shape.family == "bloom" else ("flash", "sdpa", "eager")


def masked(data: dict[str, Any], micro_batch: int) -> bool:
    """Return whether attention gets a mask: it keeps packed rows apart, and marks padding; a row alone has neither."""
    return bool(data["packing"]) or micro_batch > 1


def standalone(model: Path, plan: Plan, capacity: Capacity, strategy: str) -> list[dict[str, Any]]:
    """Return the estimates of one strategy, or of all, for a model. Raises UserError for one that there is not."""
    if strategy != "all" and strategy not in STRATEGIES:
        raise UserError(f"--strategy {strategy}: write all or one of {', '.join(STRATEGIES)}")
    shape = read_model_spec(model)
    return estimates(shape, plan, capacity, list(STRATEGIES) if strategy == "all" else [strategy])


def estimates(shape: ModelSpec, plan: Plan, capacity: Capacity, names: list[str]) -> list[dict[str, Any]]:
    """Return `{"strategy", "gpu", "host", "disk", "fits", "why", …}` of each named strategy, in bytes."""
    return [estimated(shape, replace(plan, strategy=name), capacity) for name in names]


def estimated(shape: ModelSpec, plan: Plan, capacity: Capacity) -> dict[str, Any]:
    """Return the estimate of one plan, with what dominates it and what would lower it."""
    prediction = predict(shape, plan)
    fault = impossible(plan) or too_large(prediction, capacity)
    terms = {name: value for name, value in prediction.gpu.items() if name not in SUMS}
    dominating = max(terms, key=lambda name: terms[name])
    return {
        "strategy": plan.strategy,
        "gpu": prediction.gpu,
        "host": prediction.host,
        "disk": prediction.disk,
        "phases": prediction.phases,
        "fits": fault is None,
        "why": fault or "fits",
        "dominates": dominating,
        "would_lower": remedies(shape, plan, prediction.gpu["total"]),
        "counted_from": shape.counted,
    }


SUMS = ("model_states", "total", "peak_phase")


def impossible(plan: Plan) -> str | None:
    """Return why a strategy cannot be had on this hardware at all, None if it can."""
    layout = plan.layout
    if layout.quantized and plan.on_cpu:
        return "quantized gathering has no CPU kernels"
    if "nvme" in (layout.optimizer, layout.parameters) and plan.precision == "fp32":
        return "NVMe offload takes 16 bits only"
    if layout.within_node and plan.ranks_per_node == 1:
        return "a node has one rank: nothing to share out inside it"
    return None


def too_large(prediction: Prediction, capacity: Capacity) -> str | None:
    """Return what does not fit where, None if all does."""
    gpu, host = prediction.gpu["total"], asked(prediction.host["total"])
    if capacity.gpu is not None and gpu > capacity.gpu:
        return f"needs {gib(gpu)} of a GPU's {gib(capacity.gpu)}"
    if host > capacity.host:
        return f"needs {gib(host)} of a host's {gib(capacity.host)}, headroom included"
    return None


def remedies(shape: ModelSpec, plan: Plan, total: int) -> list[dict[str, Any]]:
    """Return what would lower a GPU's total, each tried on its own, the most effective first: `{"change", "total"}`."""
    tried: list[tuple[str, Plan]] = []
    if not plan.activation_checkpointing:
        tried.append(("activation checkpointing", replace(plan, activation_checkpointing=True)))
    if plan.micro_batch > 1:
        tried.append(("micro-batch 1", replace(plan, micro_batch=1)))
    if plan.attention != attentions(shape)[0]:
        best = attentions(shape)[0]
        tried.append((f"attention {best}", replace(plan, attention=best)))
    if plan.loss == "full":
        tried.append(("a fused loss", replace(plan, loss="fused")))
    if plan.layout.stage < 3 and plan.ranks > 1:
        tried.append(("zero3", replace(plan, strategy="zero3", own=None, buckets=None)))
    if plan.layout.parameters == "gpu" and not plan.on_cpu:
        tried.append(("zero3_offload", replace(plan, strategy="zero3_offload", own=None, buckets=None)))
    found = [{"change": name, "total": predict(shape, other).gpu["total"]} for name, other in tried]
    return sorted((each for each in found if each["total"] < total), key=lambda each: each["total"])


def table(result: dict[str, Any]) -> str:
    """Return a run's estimate as a table for people."""
    model = result["model"]
    head = (
        f"{model['frozen_parameters']:,} frozen and {model['trainable_parameters']:,} trainable parameters "
        f"({model['counted_from']}), longest packed row {result['data']['longest_packed_row']} tokens, "
        f"micro-batch {result['micro_batch']}"
    )
    return f"{head}\n{rows(result['strategies'], Capacity(**result['capacity']))}"


def rows(found: list[dict[str, Any]], capacity: Capacity) -> str:
    """Return one line a strategy: GiB by term, and a bar of the total against the capacity."""
    names = ("model_states", "activations", "logits", "buffers", "reserve", "total")
    titles = ("states", "activations", "logits", "buffers", "reserve", "GPU")
    of = capacity.gpu or capacity.host
    lines = [
        f"{'GiB':<24}" + "".join(f"{title:>12}" for title in titles) + f"{'host':>10}  of {gib(of)}",
    ]
    for entry in found:
        gpu, host = entry["gpu"], entry["host"]["total"]
        cells = "".join(f"{gpu[name] / GIB:>12.2f}" for name in names) + f"{host / GIB:>10.2f}"
        used = gpu["total"] if capacity.gpu else asked(host)
        verdict = "" if entry["fits"] else f" {entry['why']}"
        lines.append(f"{entry['strategy']:<24}{cells}  {bar(used / of)}{verdict}")
    return "\n".join(lines)


def bar(share: float) -> str:
    """Return a bar that is full at 1 and overflows above."""
    filled = min(BAR, round(share * BAR))
    return f"[{'#' * filled}{'.' * (BAR - filled)}{'>' if share > 1 else ']'} {share:4.0%}"
