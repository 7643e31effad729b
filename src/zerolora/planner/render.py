"""Renders a run's configuration: its engine's options, the choice, and the reason for each value.

zerolora stage render RENDERED
"""

import shutil
from pathlib import Path
from typing import Any, TypedDict

from zerolora.config.settings import Canary, RenderSettings, TrainingChoice, UsefulFlops
from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.log import LOGGER
from zerolora.memory.estimate import data_ranks, training_spec
from zerolora.memory.predict import predict
from zerolora.memory.training_spec import RowStatistics
from zerolora.model.fused_kernels import lacks_package
from zerolora.model.spec import ModelSpec, from_json
from zerolora.planner.candidates import Candidate, Choice, Planning, step_work
from zerolora.planner.choice import Summary, choose, due, risks, safe_choice, steps_of, summary, table
from zerolora.planner.cost import useful_flops
from zerolora.planner.run_hardware import hardware_of, peak_of, target_of
from zerolora.planner.slurm_resources import TrainingResources, training
from zerolora.planner.user_config import UserLayout, check_user_config, corrected, filled, layout_of
from zerolora.planner.zero_json import ZeroJson
from zerolora.strategies import STRATEGIES
from zerolora.strategies.deepspeed_zero import ZERO, DeepSpeed, torch_optimizer_options
from zerolora.strategies.strategy import Reason, Target, nested
from zerolora.types import Kernels, Precision
from zerolora.units import counted, gib

JsonObject = dict[str, Any]


class Override(TypedDict):
    """A value of the user's DeepSpeed JSON that training's settings replace."""

    key: str
    json: Any
    training: Any


class Rendered(TypedDict):
    """results/<run>/render.json: the choice and its reasons."""

    strategy: str
    hardware: str
    """Source of the hardware's figures."""
    canary: str
    """The comparison of the first losses with those of a safe setting, and its reasons."""
    overrides: list[Override]
    reasons: list[JsonObject]
    """One entry for each of the engine's options: key, value, reason, source."""
    choice: Summary
    slurm_resources: TrainingResources
    """Training's request to a scheduler."""


def render(settings: RenderSettings, estimate: Path) -> tuple[ZeroJson, Rendered]:
    """Return (zero.json, render.json) for a run's settings.

    Training's settings override the user's JSON; "overrides" in render.json has each such key with both values. Raises
    UserError if GPU, host or disk are too small, if the strategy cannot run, or if the rows do not fill a global batch.
    """
    planning, source = planning_of(settings, estimate)
    _check_one_step(settings, planning.rows)
    candidates = choose(planning)
    check_disk(candidates[0], planning.model, estimate.parent)
    choice = candidates[0].choice
    reasons: list[Reason] = []
    overrides: list[Override] = []
    if settings.user_config is None:
        options, reasons = rendered(choice, target_of(settings), settings.gradient_clipping)
    else:
        options, overrides = rendered_user_config(choice, settings, planning.model.hidden)
    work = step_work(planning.model, training_spec(planning.model, settings, planning.rows), planning.rows)
    flops = UsefulFlops(**useful_flops(work), peak=peak_of(settings))
    chosen = training_choice(choice, settings.precision, flops, settings.kernels)
    canary, comparison = _canary(choice, options, chosen, planning)
    chosen = chosen.model_copy(update={"canary": canary})
    if lacks_package(settings.kernels, settings.device, planning.model.family, planning.model.activation):
        LOGGER.info(
            "train.kernels is auto, but liger-kernel is not installed, so training uses the model's own operations; "
            "pip install '.[kernels]' adds it"
        )
    return ZeroJson(options=options, choice=chosen), {
        "strategy": _described(choice, settings),
        "hardware": source,
        "canary": comparison,
        "overrides": overrides,
        "reasons": [entry._asdict() for entry in reasons],
        "choice": summary(candidates, settings, planning.rows),
        "slurm_resources": training(candidates[0], planning, canary.steps if canary else 0),
    }


def _check_one_step(settings: RenderSettings, rows: RowStatistics) -> None:
    """Raise UserError if all epochs together have fewer packed rows than a global batch, so that there is no step.

    `render` is the first stage that reads both numbers; runs that share `pack` may differ in them.
    """
    available, share = int(rows.packed_rows * settings.epochs), data_ranks(settings) * (settings.micro_batch or 1)
    if available >= settings.global_batch:
        return
    kind, packing = ("packed rows", ", or pack.packing: false") if rows.packing else ("rows", "")
    most = available // share * share
    remedy = f"set train.global_batch: {most} or less{packing}" if most else f"use fewer ranks{packing}"
    raise UserError(
        f"train.global_batch is {settings.global_batch}, but train.epochs: {settings.epochs} of {rows.packed_rows} "
        f"{kind} to train on make {available}, not one step; {remedy}, or more epochs, or prepare more rows"
    )


def _canary(
    choice: Choice, options: JsonObject, chosen: TrainingChoice, planning: Planning
) -> tuple[Canary | None, str]:
    """Return the canary of a run, None if nothing is risky or nothing safe fits; and a sentence on it."""
    settings = planning.settings
    reasons, count = list(risks(choice, options, settings)), due(settings, steps_of(settings, planning.rows))
    if not reasons or not count:
        return None, f"none: {'the run is too short, or train.canary is off' if reasons else 'nothing is risky'}"
    safe = safe_choice(planning)
    if safe is None:
        return None, f"none, as no safe setting fits: {'; '.join(reasons)}"
    safe_options, _ = rendered(safe, target_of(settings), settings.gradient_clipping)
    safe_chosen = training_choice(safe, settings.precision, chosen.flops)
    zero = ZeroJson(options=safe_options, choice=safe_chosen).as_json()
    comparison = (
        f"{counted(count, 'step')}, compared with {safe.strategy} with {safe.attention} attention: {'; '.join(reasons)}"
    )
    return Canary(steps=count, reasons=reasons, zero=zero), comparison


def planning_of(settings: RenderSettings, estimate: Path) -> tuple[Planning, str]:
    """Return the input of the choice, and the source of the hardware's figures.

    Raises UserError if the estimate is missing or out of date, or if the strategy cannot run.
    """
    predicted = read_json(estimate, "zerolora stage estimate")
    try:
        model, rows = from_json(predicted["shape"]), RowStatistics(**predicted["data"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{estimate}: was written by another version; run `zerolora stage estimate` again") from None
    hardware, source = hardware_of(settings)
    user: UserLayout | None = None
    if settings.user_config is not None:
        check_user_config(settings.strategy, settings.user_config, target_of(settings))
        user = layout_of(filled(settings.user_config, model.hidden))
    elif settings.strategy != "auto":
        STRATEGIES[settings.strategy].check(target_of(settings))
    return Planning(model, settings, rows, hardware, user), source


def check_disk(chosen: Candidate, model: ModelSpec, directory: Path) -> None:
    """Raise UserError if the results' disk has too little free space for the run."""
    disk, free = predict(model, chosen.spec).disk, shutil.disk_usage(directory).free
    written = {name: disk[name] for name in ("merged", "checkpoints", "adapter", "teacher") if name in disk}
    if sum(written.values()) > free:
        terms = ", ".join(f"{name} {gib(value)}" for name, value in written.items())
        raise UserError(
            f"{directory}: the run writes {gib(sum(written.values()))} ({terms}), but {gib(free)} of the disk are "
            "free; free some, or put results and work on a larger disk; no strategy writes less"
        )


def _described(choice: Choice, settings: RenderSettings) -> str:
    why = "the fastest predicted that fits" if settings.strategy == "auto" else "as render.strategy says"
    if settings.user_config is not None:
        why = "your own"
    saving = "with" if choice.activation_checkpointing else "without"
    fused = f", kernels of liger-kernel for {', '.join(choice.kernels)}" if choice.kernels else ""
    return (
        f"{choice.strategy}, {why}; micro-batch {choice.micro_batch} x {choice.accumulation}, {saving} activation "
        f"checkpointing, {choice.attention} attention{fused}"
    )


def rendered(choice: Choice, target: Target, gradient_clipping: float) -> tuple[JsonObject, list[Reason]]:
    """Return (options of the engine, reasons) for a named strategy. Raises UserError if it cannot run."""
    strategy = STRATEGIES[choice.strategy]
    strategy.check(target)
    reasons = list(strategy.options(choice.buckets, target))
    if isinstance(strategy, DeepSpeed):
        reasons += strategy.adding(target, choice.accumulation)
    return {**nested(reasons), **_from_training(choice, target, gradient_clipping)}, reasons


def rendered_user_config(choice: Choice, settings: RenderSettings, hidden: int) -> tuple[JsonObject, list[Override]]:
    """Return (options of DeepSpeed, overrides) for the user's checked JSON."""
    assert settings.user_config is not None
    options = filled(settings.user_config, hidden)
    overrides: list[Override] = [
        {"key": ".".join(each.at), "json": each.value, "training": each.instead}
        for each in corrected(settings.user_config)[1]
    ]
    target, strategy = target_of(settings), layout_of(options).strategy
    overrides += _override(options, _from_training(choice, target, settings.gradient_clipping))
    options |= nested(strategy.adding(target, choice.accumulation))
    for key in ("optimizer", "scheduler"):
        if key in options:
            overrides.append({"key": key, "json": options.pop(key), "training": "train.optimizer and train.schedule"})
    overrides += _override(options, nested(torch_optimizer_options()))
    return options, overrides


def training_choice(
    choice: Choice, precision: Precision, flops: UsefulFlops, kernels: Kernels = "off"
) -> TrainingChoice:
    """Return training's settings beside the options of its engine."""
    return TrainingChoice(
        engine=STRATEGIES[choice.strategy].engine if choice.strategy in STRATEGIES else "deepspeed",
        strategy=choice.strategy,
        micro_batch=choice.micro_batch,
        accumulation=choice.accumulation,
        activation_checkpointing=choice.activation_checkpointing,
        attention=choice.attention,
        precision=precision,
        kernels=kernels if choice.kernels else "off",
        flops=flops,
    )


def _from_training(choice: Choice, target: Target, gradient_clipping: float) -> JsonObject:
    return {
        "train_micro_batch_size_per_gpu": choice.micro_batch,
        "gradient_accumulation_steps": choice.accumulation,
        "train_batch_size": choice.micro_batch * choice.accumulation * target.ranks,
        "gradient_clipping": gradient_clipping,
        "bf16": {"enabled": target.precision == "bf16"},
        "fp16": {"enabled": target.precision == "fp16"},
    }


def _override(options: JsonObject, training: JsonObject, prefix: str = "") -> list[Override]:
    """Merge `training` into `options`; return the user's values that change."""
    changed: list[Override] = []
    for key, value in training.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            changed += _override(options.setdefault(key, {}), value, f"{name}.")
            continue
        if key in options and options[key] not in (value, "auto"):
            changed.append({"key": name, "json": options[key], "training": value})
        options[key] = value
    return changed


def lines(explained: Rendered) -> str:
    """Return render.json as text for the log."""
    overrides = [
        f"  {entry['key']}: your JSON sets {entry['json']!r}, training says {entry['training']!r}; training wins"
        for entry in explained["overrides"]
    ]
    values = [
        f"  {entry['key'].removeprefix(f'{ZERO}.')} = {entry['value']}: {entry['reason']}"
        for entry in explained["reasons"]
    ]
    chosen = [
        f"strategy: {explained['strategy']}",
        f"hardware: {explained['hardware']}",
        f"canary: {explained['canary']}",
        table(explained["choice"]),
    ]
    return "\n".join([*chosen, *overrides, *values])
