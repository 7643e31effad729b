"""The candidates of a choice: every configuration that the settings allow, with its predicted bytes and seconds.

Settings may leave open: strategy, micro-batch (accumulation follows from the global batch), activation checkpointing,
attention, and the sizes of DeepSpeed's buckets.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

from zerolora.config.settings import RenderSettings
from zerolora.memory.estimate import Capacity, data_ranks, impossible, masked, open_attentions, too_large, training_spec
from zerolora.memory.predict import layer_work, predict, sized
from zerolora.memory.training_spec import RowStatistics, TrainingSpec
from zerolora.model.attention_kernels import computes_scores
from zerolora.model.fused_kernels import Part
from zerolora.model.spec import FEWEST, WORTH, ModelSpec
from zerolora.planner.cost import Cost, step_seconds
from zerolora.planner.hardware import HardwareRates
from zerolora.planner.run_hardware import target_of
from zerolora.planner.user_config import UserLayout
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Buckets, StepWork, Strategy
from zerolora.types import Attention

ATTENTIONS = ("flash", "sdpa", "eager")  # the fastest first, as in a ModelSpec
WORTH_MORE = 1.1
"""Factor over the minimum from which keeping more weights gathered is a candidate."""
IN_A_LAYER = re.compile(r"\.(\{\}|\d+)\.")  # of a module's path: model.layers.{}.mlp.up_proj


@dataclass(frozen=True)
class Choice:
    """A strategy and its values."""

    strategy: str
    """A strategy's name, or the path of the user's DeepSpeed JSON."""
    micro_batch: int
    """Packed rows of one forward pass of one rank."""
    accumulation: int
    """Forward passes of one optimizer step of one rank."""
    activation_checkpointing: bool
    """Keep only each layer's input."""
    attention: Attention
    buckets: Buckets
    """DeepSpeed's sizes, in elements; all 0 for the other engines."""
    kernels: tuple[Part, ...] = ()
    """What liger-kernel computes."""


@dataclass(frozen=True)
class Candidate:
    """A choice with its predictions."""

    choice: Choice
    spec: TrainingSpec
    gpu: int
    """Bytes on a GPU."""
    host: int
    """Bytes on a host."""
    needed: int
    """Of these, the bytes that the host must have: not pages of files, which the system drops where memory is short."""
    cost: Cost
    """Of one optimizer step."""
    fault: str | None
    """Reason for its rejection; None if it fits."""

    @property
    def layout(self) -> Strategy:
        """The strategy's layout."""
        return self.spec.layout

    @property
    def seconds(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.cost.total

    @property
    def order(self) -> int:
        """The strategy's place in the table of strategies. That of a user's JSON is the only one."""
        return list(STRATEGIES).index(self.layout.name) if self.layout.name in STRATEGIES else 0

    @property
    def preference(self) -> tuple[float, int, bool, int, int]:
        """The sort key among equal times, lowest first: the bytes on the network between nodes, which other jobs use
        too, the strategy's order, no checkpointing, the attention that computes least, the most free memory."""
        choice = self.choice
        attention = ATTENTIONS.index(choice.attention)
        return (self.cost.between_nodes, self.order, choice.activation_checkpointing, attention, self.gpu)


@dataclass(frozen=True)
class Planning:
    """The input of a choice."""

    model: ModelSpec
    settings: RenderSettings
    rows: RowStatistics
    hardware: HardwareRates
    user: UserLayout | None = None
    """The user's DeepSpeed JSON, if any."""


def candidates(planning: Planning) -> list[Candidate]:
    """Return every candidate, also those that do not fit."""
    return [predicted(planning, spec) for spec in open_specs(planning)]


def open_specs(planning: Planning) -> Iterator[TrainingSpec]:
    """Yield every training spec that the settings allow."""
    model, settings, user = planning.model, planning.settings, planning.user
    base = training_spec(model, settings, planning.rows)
    per_rank = settings.global_batch // data_ranks(settings)
    saving = settings.activation_offload or settings.activation_checkpointing  # only checkpoints are offloaded
    for name, micro_batch, checkpointing, kind in itertools.product(
        _names(settings),
        [settings.micro_batch] if settings.micro_batch else divisors(per_rank),
        (False, True) if saving is None else (saving,),
        open_attentions(model, settings),
    ):
        spec = replace(
            base,
            strategy=name,
            own=user.strategy if user else None,
            micro_batch=micro_batch,
            accumulation=per_rank // micro_batch,
            activation_checkpointing=checkpointing,
            attention=kind,
            masked=masked(planning.rows, micro_batch * len(base.objective.texts)),
        )
        for sizes in [user.buckets] if user else open_buckets(model, spec, planning.hardware):
            yield replace(spec, buckets=sizes)


def _names(settings: RenderSettings) -> list[str]:
    if settings.strategy != "auto":
        return [settings.strategy]
    # Quantization changes weights or gradients, so it must be named; NVMe needs a directory.
    return [
        name
        for name, layout in STRATEGIES.items()
        if not (layout.quantized or layout.quantized_gradients) and (settings.nvme or not layout.on_disk)
    ]


def open_buckets(model: ModelSpec, spec: TrainingSpec, hardware: HardwareRates) -> list[Buckets]:
    """Return the bucket sizes to choose from. At stage 3 they keep two layers gathered, or all, so that each is
    gathered half as often."""
    least = sized(model, spec)
    if not least.prefetch:  # below stage 3, and with weights on NVMe
        return [least]
    everything = round(model.parameters - spec.saved_by_packing(model)) + spec.parameters(model).trained
    # Prefetch enough to make the link's latency a small part of the time; prefetched weights are live too.
    ahead = min(everything, max(least.prefetch, int(worthwhile(hardware) / spec.width)))
    live = min(everything, least.live + ahead - least.prefetch)
    least = replace(least, prefetch=ahead, live=live)
    more = ((live + everything) // 2, everything)
    return [least, *(replace(least, live=each) for each in more if each > WORTH_MORE * live)]


def worthwhile(hardware: HardwareRates) -> float:
    """Return the bytes of a gather for which the ring latency of the slowest link is a tenth of the time."""
    link, hops = (hardware.network, hardware.nodes - 1) if hardware.nodes > 1 else (hardware.node, hardware.ranks - 1)
    return 10 * hops * link.latency * link.bandwidth if math.isfinite(link.bandwidth) else 0.0


def predicted(planning: Planning, spec: TrainingSpec) -> Candidate:
    """Predict the bytes and seconds of a training spec."""
    model, settings = planning.model, planning.settings
    prediction = predict(model, spec)
    capacity = Capacity(settings.gpu_memory, settings.host_memory)
    # A user's JSON names its disk, which planner/user_config.py checks.
    conflict = None if spec.own else spec.layout.conflict(target_of(settings))
    fault = impossible(spec, model) or (conflict and conflict.problem) or too_large(prediction, capacity)
    return Candidate(
        choice=Choice(
            spec.strategy,
            spec.micro_batch,
            spec.accumulation,
            spec.activation_checkpointing,
            spec.attention,
            prediction.buckets,
            spec.kernels,
        ),
        spec=spec,
        gpu=prediction.gpu["total"],
        host=prediction.host["total"],
        needed=prediction.host["needed"],
        cost=step_seconds(step_work(model, spec, planning.rows), spec.layout, planning.hardware),
        fault=fault,
    )


def step_work(model: ModelSpec, spec: TrainingSpec, rows: RowStatistics) -> StepWork:
    """Return the work of an average step, with rows of mean length."""
    parameters = spec.parameters(model)
    linears = [module for module in model.modules if module.kind in ("linear", "conv1d", "head", "experts")]
    matmul = sum(module.parameters * module.count for module in linears)
    if model.tied:
        matmul += model.vocabulary * model.hidden
    parts = spec.accumulation * spec.ranks // spec.sequence_parallel
    mean = max(1, round(rows.tokens / rows.packed_rows * rows.padded(spec.micro_batch, parts)))
    merged, merging = merged_factors(model, parameters.ranks)
    # Without a kernel all scores are written, as by eager attention.
    masked = spec.masked and spec.attention == "sdpa"
    scores = not spec.on_cpu and computes_scores(model, spec.attention, spec.capability, spec.width == 2, masked)
    attention: Attention = "eager" if scores else spec.attention
    method = spec.prepared_method
    # Less than a byte a weight is decoded before it is multiplied.
    decoded = [each for each in linears if method.packed(each, spec.width) * spec.width < each.parameters]
    texts = len(spec.objective.texts)
    sequences, of_pairs = texts * rows.rows / rows.packed_rows, rows.shared_prompts / rows.packed_rows
    of_all = (sequences - 1 / spec.micro_batch) * rows.common_prefix * (rows.common_prefix >= FEWEST)
    return StepWork(
        length=mean,
        micro_batch=spec.micro_batch,
        accumulation=spec.accumulation,
        frozen=round(parameters.frozen - spec.saved_by_packing(model)),
        trainable=parameters.trained,
        matmul=matmul,
        modules=sum(module.count for module in linears),
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        head_dim=model.head_dim,
        vocabulary=model.vocabulary,
        attended=rows.mean_row_of_a_token / 2 if spec.attention == "flash" else mean if rows.packing else mean / texts,
        supervised=rows.supervised_tokens / rows.tokens,
        checkpointing=spec.activation_checkpointing,
        attention=attention,
        kernels=spec.kernels,
        width=cast(Literal[2, 4], spec.width),
        live=spec.buckets.live if spec.buckets and spec.buckets.live else 0,
        key_heads=model.key_heads,
        sequence_parallel=spec.sequence_parallel,
        idle=model.parameters - model.active_parameters,
        merged=merged,
        merging=merging,
        forwards_before=spec.objective.forwards_before,
        head_bytes=spec.objective.logit_bytes(),
        offloads_inputs=spec.offloads_inputs,
        update_traffic=spec.optimizer.traffic(),
        update_on_host=spec.optimizer.host_time,
        update_states=spec.optimizer.state_bytes(parameters) / parameters.trained,
        decoded=sum(module.parameters * module.count for module in decoded),
        decoded_modules=sum(module.count for module in decoded),
        outside=sum(module.parameters for module in model.modules if not IN_A_LAYER.search(module.path)),
        prefix=rows.common_prefix if _shares(model, spec, rows, of_all) else 0,
        rows=max(1.0, sequences),
        shared_prompts=of_pairs if _shares(model, spec, rows, of_pairs) else 0.0,
        shared_prompt=rows.shared_prompt_of_a_token,
        counted=layer_work(model, replace(spec, length=mean)),
    )


def _shares(model: ModelSpec, spec: TrainingSpec, rows: RowStatistics, saved: float) -> bool:
    """Return whether training computes tokens once that rows of a micro-batch begin with, which are `saved` in a packed
    row (train/common_prefix.py, `allowed` and `worthwhile`). False for an unknown family, which may mix tokens outside
    of attention. NEFTune, which also prevents it, is not in the settings."""
    if model.counted != "config.json" or spec.method.drops or model.attention_dropout or model.hidden_dropout:
        return False
    if spec.attention != "flash" or spec.sequence_parallel > 1 or spec.compiles:
        return False
    return saved > 0 and saved >= WORTH * rows.tokens / rows.packed_rows


def merged_factors(model: ModelSpec, ranks: tuple[tuple[str, int], ...]) -> tuple[int, int]:
    """Return the elements of the factors of experts' weights, and the multiplications of their products, which peft
    adds to the weights before use (peft/tuners/lora/layer.py, ParamWrapper)."""
    of, factors, multiplications = dict(ranks), 0, 0
    for module in model.modules:
        for name, shape in module.weights:
            r = of.get(f"{module.path}.{name}", 0)
            if r and len(shape) == 3:
                experts, outputs, inputs = shape
                factors += r * experts * (outputs + inputs) * module.count
                multiplications += r * experts * outputs * inputs * module.count
    return factors, multiplications


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]
