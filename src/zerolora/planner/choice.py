"""The choice: of all ways to train that fit, the one that the cost model finds fastest. Nothing is tried.

What the config leaves open is searched: strategy, micro-batch (accumulation follows from the global batch), activation
checkpointing, attention, and the sizes of DeepSpeed's buckets. What it fixes is kept.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from zerolora.config.settings import EstimateSettings
from zerolora.errors import UserError
from zerolora.memory.buffers import Buckets
from zerolora.memory.estimate import Capacity, attentions, estimated, impossible, masked, too_large, training_spec
from zerolora.memory.model_spec import ModelSpec
from zerolora.memory.predict import predict, sized
from zerolora.memory.states import BYTES
from zerolora.memory.table import rows
from zerolora.memory.training_spec import TrainingSpec
from zerolora.planner.cost import Cost, Work, step_seconds
from zerolora.planner.hardware import Hardware
from zerolora.strategies import STRATEGIES, Strategy
from zerolora.types import Attention
from zerolora.units import GIB

TIE = 0.01
"""Predicted times that differ by less count as equal: the model is not that good."""
ENGINES = ("ddp", "deepspeed", "fsdp")  # at stage 0 torch's own does less beside the step (benchmarks/choice.py)
ATTENTIONS = ("flash", "sdpa", "eager")  # the fastest first, as attentions() has them
WORTH_MORE = 1.1
"""Keeping more weights gathered is tried if it is at least so many times the least: else it is the same thing."""
SHOWN = 10  # of each kind, in the table for people
IN_A_LAYER = re.compile(r"\.(\{\}|\d+)\.")  # of a module's path: model.layers.{}.mlp.up_proj


@dataclass(frozen=True)
class Choice:
    """A strategy and all that goes with it."""

    strategy: str
    """One of strategies.py."""
    micro_batch: int
    """Packed rows of one forward pass of one rank."""
    accumulation: int
    """Forward passes of one optimizer step of one rank."""
    activation_checkpointing: bool
    """Keep each layer's input only."""
    attention: Attention
    """Implementation of attention."""
    buckets: Buckets
    """DeepSpeed's sizes, in elements; all 0 for the other engines."""


@dataclass(frozen=True)
class Candidate:
    """A choice with what is predicted of it."""

    choice: Choice
    plan: TrainingSpec
    """What it was predicted from."""
    gpu: int
    """Bytes on a GPU."""
    host: int
    """Bytes on a host."""
    layout: Strategy
    cost: Cost
    """Of one optimizer step."""
    fault: str | None
    """Why it is rejected; None if it is not."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.cost.total

    @property
    def rank(self) -> tuple[Any, ...]:
        """What decides between equal times: the lowest stage, the leanest engine, nothing moved away, activations kept,
        the attention that computes least, the most room."""
        layout, choice = self.layout, self.choice
        moved = (layout.optimizer != "gpu", layout.parameters != "gpu", layout.within_node, layout.quantized)
        kept = (choice.activation_checkpointing, ATTENTIONS.index(choice.attention))
        return (layout.stage, ENGINES.index(layout.engine), moved, kept, self.gpu, choice.strategy)


Own = tuple[Strategy, Buckets]
"""What a DeepSpeed JSON of the user's own amounts to."""


def choose(
    shape: ModelSpec, settings: dict[str, Any], data: dict[str, Any], hardware: Hardware, own: Own | None = None
) -> list[Candidate]:
    """Return every candidate: first those that fit, the best first, then the rejected by bytes.

    `settings` are those of render (resolve.py), `data` is memory/estimate.py's data_of. Raises UserError if none fits,
    with the nearest that would.
    """
    found = [
        predicted(shape, plan, settings, data, hardware) for plan in candidates(shape, settings, data, hardware, own)
    ]
    fitting = [each for each in found if each.fault is None]
    if not fitting:
        raise UserError(refusal(found, shape, settings, nearest(shape, settings, data, hardware, own)))
    fastest = min(each.seconds for each in fitting)
    tied = [each for each in fitting if each.seconds <= fastest * (1 + TIE)]
    best = min(tied, key=lambda each: each.rank)
    rest = sorted((each for each in fitting if each is not best), key=lambda each: (each.seconds, each.rank))
    rejected = sorted((each for each in found if each.fault), key=lambda each: (each.gpu, each.host))
    return [best, *rest, *rejected]


def candidates(
    shape: ModelSpec, settings: dict[str, Any], data: dict[str, Any], hardware: Hardware, own: Own | None = None
) -> Iterator[TrainingSpec]:
    """Yield every plan that the settings leave open."""
    base = training_spec(shape, estimate_settings(settings), data)
    per_rank = settings["global_batch"] // base.ranks
    micro_batches = [settings["micro_batch"]] if settings["micro_batch"] else divisors(per_rank)
    saving, attention = settings["activation_checkpointing"], settings["attention"]
    for name, micro_batch, checkpointing, kind in itertools.product(
        _names(settings),
        micro_batches,
        (False, True) if saving is None else (saving,),
        attentions(shape) if attention is None else (attention,),
    ):
        plan = replace(
            base,
            strategy=name,
            own=own[0] if own else None,
            micro_batch=micro_batch,
            accumulation=per_rank // micro_batch,
            activation_checkpointing=checkpointing,
            attention=kind,
            masked=masked(data, micro_batch),
        )
        for sizes in [own[1]] if own else sizes_of(shape, plan, hardware):
            yield replace(plan, buckets=sizes)


def estimate_settings(settings: dict[str, Any]) -> EstimateSettings:
    """Return what the estimate reads of render's settings."""
    return EstimateSettings.model_validate({name: settings[name] for name in EstimateSettings.model_fields})


def _names(settings: dict[str, Any]) -> list[str]:
    if settings["strategy"] != "auto":
        return [settings["strategy"]]
    # Quantized weights are other weights, so training with them is the user's to ask for; NVMe needs a folder.
    return [
        name
        for name, layout in STRATEGIES.items()
        if not layout.quantized and (layout.parameters != "nvme" or settings["nvme"])
    ]


def sizes_of(shape: ModelSpec, plan: TrainingSpec, hardware: Hardware) -> list[Buckets]:
    """Return the bucket sizes to choose from: at stage 3, weights for two layers live at a time, or all of them, which
    are then gathered half as often."""
    least = sized(shape, plan)
    if plan.layout.engine != "deepspeed" or plan.layout.stage < 3:
        return [least]
    everything = shape.parameters + plan.parameters(shape).trained
    # So much is gathered ahead that the link's latency is a small part of it; what is ahead is live too.
    ahead = min(everything, max(least.prefetch, int(worthwhile(hardware) / BYTES[plan.precision])))
    live = min(everything, least.live + ahead - least.prefetch)
    least = replace(least, prefetch=ahead, live=live)
    more = ((live + everything) // 2, everything)
    return [least, *(replace(least, live=each) for each in more if each > WORTH_MORE * live)]


def worthwhile(hardware: Hardware) -> float:
    """Return the bytes of a gather in which the latency of the slowest link's ring is a tenth of the time."""
    link, hops = (hardware.network, hardware.nodes - 1) if hardware.nodes > 1 else (hardware.node, hardware.ranks - 1)
    return 10 * hops * link.latency * link.bandwidth if math.isfinite(link.bandwidth) else 0.0


def predicted(
    shape: ModelSpec, plan: TrainingSpec, settings: dict[str, Any], data: dict[str, Any], hardware: Hardware
) -> Candidate:
    """Return a plan with its bytes and seconds."""
    prediction = predict(shape, plan)
    capacity = Capacity(settings["gpu_memory"], settings["host_memory"])
    work = work_of(shape, plan, data)
    return Candidate(
        choice=Choice(
            plan.strategy,
            plan.micro_batch,
            plan.accumulation,
            plan.activation_checkpointing,
            plan.attention,
            prediction.buckets,
        ),
        plan=plan,
        layout=plan.layout,
        gpu=prediction.gpu["total"],
        host=prediction.host["total"],
        cost=step_seconds(work, plan.layout, hardware),
        fault=impossible(plan) or _unwanted(shape, plan, settings) or too_large(prediction, capacity),
    )


def _unwanted(shape: ModelSpec, plan: TrainingSpec, settings: dict[str, Any]) -> str | None:
    if plan.own is None and "nvme" in (plan.layout.optimizer, plan.layout.parameters) and not settings["nvme"]:
        return "hardware.nvme names no folder"
    if plan.layout.engine != "deepspeed" and plan.precision == "fp16":
        return "fp16 needs DeepSpeed's loss scaling"
    if shape.counted == "config.json" and plan.attention not in attentions(shape):
        return f"the model has no {plan.attention} attention; write {' or '.join(attentions(shape))}"
    return None


def work_of(shape: ModelSpec, plan: TrainingSpec, data: dict[str, Any]) -> Work:
    """Return the work of an average step: of rows of mean length, where memory goes by the longest."""
    what = plan.parameters(shape)
    linears = [module for module in shape.modules if module.kind in ("linear", "conv1d", "head", "experts")]
    matmul = sum(module.parameters * module.count for module in linears)
    if shape.tied:
        matmul += shape.vocabulary * shape.hidden
    mean = max(1, round(data["tokens"] / data["packed_rows"]))
    return Work(
        length=mean,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        frozen=what.frozen,
        trainable=what.trained,
        matmul=matmul,
        modules=sum(module.count for module in linears),
        layers=shape.layers + shape.encoder_layers,
        hidden=shape.hidden,
        heads=shape.heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        attended=data["mean_row_of_a_token"] / 2 if plan.attention == "flash" else mean,
        supervised=data["supervised_tokens"] / data["tokens"],
        checkpointing=plan.activation_checkpointing,
        attention=plan.attention,
        width=cast(Literal[2, 4], BYTES[plan.precision]),
        live=plan.buckets.live if plan.buckets and plan.buckets.live else 0,
        outside=sum(module.parameters for module in shape.modules if not IN_A_LAYER.search(module.path)),
    )


def divisors(number: int) -> list[int]:
    """Return what divides a number, from 1 on."""
    return [each for each in range(1, number + 1) if number % each == 0]


def nearest(
    shape: ModelSpec, settings: dict[str, Any], data: dict[str, Any], hardware: Hardware, own: Own | None = None
) -> Candidate | None:
    """Return what fits and differs least from the settings, None if nothing does.

    Little: micro-batch, checkpointing, attention, which change no loss. More: another stage, then another engine. Most:
    what is kept on the host. Among equals the fastest.
    """
    loose = settings | {"micro_batch": None, "activation_checkpointing": None, "attention": None}
    plans = [
        *candidates(shape, loose, data, hardware, own),
        *candidates(shape, loose | {"strategy": "auto"}, data, hardware),
    ]
    found = [predicted(shape, plan, settings, data, hardware) for plan in plans]
    wanted = own[0] if own else STRATEGIES.get(settings["strategy"])
    fitting = [each for each in found if each.fault is None]
    return min(fitting, key=lambda each: distance(each, wanted, settings), default=None)


def distance(found: Candidate, wanted: Strategy | None, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return how far a candidate is from the settings; `wanted` is the strategy that they name, None for auto."""
    layout, little = found.layout, len(changes(found.choice, settings).get("train", {}))
    if wanted is None:
        return (little, found.seconds)
    moved = abs(_moved(layout) - _moved(wanted))
    unlike = (layout.engine != wanted.engine) + (layout.within_node != wanted.within_node)
    named = found.choice.strategy != settings["strategy"]
    return (moved, unlike, abs(layout.stage - wanted.stage), named, little, found.seconds)


def _moved(layout: Strategy) -> int:
    places = ("gpu", "cpu", "nvme")
    return places.index(layout.optimizer) + places.index(layout.parameters)


def changes(choice: Choice, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys of the config that keep a choice from being made, by section, with its values."""
    sections = {"render": ("strategy",), "train": ("micro_batch", "activation_checkpointing", "attention")}
    found = {
        section: {
            key: getattr(choice, key) for key in keys if settings[key] not in (None, "auto", getattr(choice, key))
        }
        for section, keys in sections.items()
    }
    return {section: values for section, values in found.items() if values}


def refusal(found: list[Candidate], shape: ModelSpec, settings: dict[str, Any], instead: Candidate | None) -> str:
    """Return the message: for each strategy the least that it needs, and what fits instead or would help."""
    capacity = Capacity(settings["gpu_memory"], settings["host_memory"])
    least: dict[str, Candidate] = {}
    for each in found:
        name = each.choice.strategy
        if name not in least or (each.gpu, each.host) < (least[name].gpu, least[name].host):
            least[name] = each
    needed = [estimated(shape, each.plan, capacity) | {"fits": False, "why": each.fault} for each in least.values()]
    lines = [
        f"render.strategy is {settings['strategy']} and nothing fits, not even with the smallest that "
        "train.micro_batch, activation_checkpointing and attention allow:",
        *_indented(rows(needed, capacity)),
    ]
    if instead is None:
        lines.append(
            "use more or larger GPUs, shorter rows (pack.capacity, prepare.max_length), or leave those keys at auto"
        )
        return "\n".join(lines)
    row = rows([estimated(shape, instead.plan, capacity)], capacity).splitlines()[1]
    lines += [
        f"the nearest that fits, micro-batch {instead.choice.micro_batch} x {instead.choice.accumulation}, "
        f"{instead.seconds:.3g} s a step predicted:",
        *_indented(row),
        "write into config/config.yaml, or into the run:",
    ]
    for section, values in changes(instead.choice, settings).items():
        lines += [f"  {section}:", *(f"    {key}: {str(value).lower()}" for key, value in values.items())]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def summary(found: list[Candidate], settings: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the ranked table as JSON: bytes, seconds, tokens/s, GPU-hours for the run, why others were rejected."""
    steps = steps_of(settings, data)
    tokens = data["tokens"] / data["packed_rows"] * settings["global_batch"]
    ranks = settings["nodes"] * settings["ranks_per_node"]
    return {
        "steps": steps,
        "considered": len(found),
        "ranked": [
            {
                "strategy": each.choice.strategy,
                "micro_batch": each.choice.micro_batch,
                "accumulation": each.choice.accumulation,
                "activation_checkpointing": each.choice.activation_checkpointing,
                "attention": each.choice.attention,
                "live_parameters": each.choice.buckets.live,
                "gpu_bytes": each.gpu,
                "host_bytes": each.host,
                "step_seconds": each.seconds,
                "tokens_per_second": tokens / each.seconds,
                "rank_hours": steps * each.seconds * ranks / 3600,
                "rejected": each.fault,
            }
            for each in found
        ],
    }


def steps_of(settings: dict[str, Any], data: dict[str, Any]) -> int:
    """Return the optimizer steps of a run."""
    steps = int(data["packed_rows"] * settings["epochs"] // settings["global_batch"])
    return min(steps, settings["max_steps"] or steps)


def table(summarized: dict[str, Any]) -> str:
    """Return the best, and the nearest of the rejected, for people."""
    ranked = summarized["ranked"]
    fitting = [each for each in ranked if not each["rejected"]]
    rejected = [each for each in ranked if each["rejected"]]
    lines = [
        f"{len(fitting)} of {len(ranked)} configurations fit; predicted for {summarized['steps']} steps:",
        f"{'strategy':<24}{'micro-batch':>12}{'checkpointing':>14}{'attention':>10}{'GPU GiB':>9}{'host GiB':>9}"
        f"{'s/step':>9}{'tokens/s':>10}{'rank-hours':>11}",
    ]
    lines += [_line(each) for each in fitting[:SHOWN]]
    if rejected:
        lines.append("rejected, of each strategy the smallest:")
        smallest = {each["strategy"]: each for each in reversed(rejected)}
        lines += [f"{_line(each)}  {each['rejected']}" for each in reversed(smallest.values())]
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    batch = f"{entry['micro_batch']} x {entry['accumulation']}"
    saving = "yes" if entry["activation_checkpointing"] else "no"
    return (
        f"{entry['strategy']:<24}{batch:>12}{saving:>14}{entry['attention']:>10}{entry['gpu_bytes'] / GIB:>9.2f}"
        f"{entry['host_bytes'] / GIB:>9.2f}{entry['step_seconds']:>9.3g}{entry['tokens_per_second']:>10.0f}"
        f"{entry['rank_hours']:>11.3g}"
    )
