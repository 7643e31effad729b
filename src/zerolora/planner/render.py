"""Write what training reads of a run, the DeepSpeed JSON with the choice beside it, and why it is so.

zerolora render --settings JSON --estimate results/NAME/estimate.json
                --output results/NAME/zero.json --reasons results/NAME/render.json
"""

import shutil
from pathlib import Path
from typing import Any

from zerolora.config.settings import TrainingChoice, UsefulFlops
from zerolora.errors import UserError
from zerolora.files import read_json
from zerolora.memory.estimate import training_spec
from zerolora.memory.model_spec import ModelSpec, from_json
from zerolora.memory.predict import predict
from zerolora.planner import slurm_resources
from zerolora.planner.choice import Candidate, Choice, choose, estimate_settings, summary, table, work_of
from zerolora.planner.cost import useful_flops
from zerolora.planner.engine_config import ZERO, aio_json, check, ddp_json, fsdp_json, strategy_json
from zerolora.planner.machines import hardware_of, peak_of
from zerolora.planner.reasons import Reason, nested
from zerolora.planner.user_config import check_own, described, filled
from zerolora.strategies import STRATEGIES
from zerolora.types import Precision
from zerolora.units import gib

NEVER = 10**9  # steps between DeepSpeed's own progress lines; the loop has a bar
ENGINE = "deepspeed/runtime/engine.py"


def render(settings: dict[str, Any], estimate: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (zero.json, render.json) for a run's settings.

    What the training section says wins over the user's own JSON; reasons["overrides"] lists each key with both
    values. reasons["request"] is what training asks of a scheduler (requests.py). Raises UserError if GPU, host or disk
    are too small, or if the strategy cannot run.
    """
    predicted = read_json(estimate, "zerolora estimate")
    if not {"shape", "data"} <= predicted.keys():
        raise UserError(f"{estimate}: is of another version; run `zerolora estimate` again")
    shape, data = from_json(predicted["shape"]), predicted["data"]
    hardware, source = hardware_of(settings)
    own = None
    if settings["own_json"] is not None:
        check_own(settings["strategy"], settings["own_json"], {**settings, "ranks": _ranks(settings)})
        own = described(filled(settings["own_json"], shape.hidden))
    elif settings["strategy"] != "auto":
        check(
            STRATEGIES[settings["strategy"]],
            settings["device"],
            _ranks(settings),
            settings["ranks_per_node"],
            settings["nvme"],
            settings["precision"],
        )
    found = choose(shape, settings, data, hardware, own)
    check_disk(found[0], shape, estimate.parent)
    choice = found[0].choice
    work = work_of(shape, training_spec(shape, estimate_settings(settings), data), data)
    if own is None:
        config, reasons = rendered(choice, settings)
        overrides: list[dict[str, Any]] = []
    else:
        (config, overrides), reasons = rendered_own(choice, settings, shape.hidden), []
    flops = UsefulFlops(**useful_flops(work), peak=peak_of(settings))
    config["zerolora"] = training_choice(choice, settings["precision"], flops).model_dump(mode="json")
    return config, {
        "strategy": _words(choice, settings),
        "hardware": source,
        "overrides": overrides,
        "reasons": [entry._asdict() for entry in reasons],
        "choice": summary(found, settings, data),
        "request": slurm_resources.training(found[0], shape, settings, data),
    }


def check_disk(found: Candidate, shape: ModelSpec, folder: Path) -> None:
    """Raise UserError if the disk of the results has no room for what the run writes."""
    disk, free = predict(shape, found.plan).disk, shutil.disk_usage(folder).free
    written = {name: disk[name] for name in ("merged", "checkpoints", "adapter")}
    if sum(written.values()) > free:
        terms = ", ".join(f"{name} {gib(value)}" for name, value in written.items())
        raise UserError(
            f"{folder}: the run writes {gib(sum(written.values()))} ({terms}), but {gib(free)} of the disk are free; "
            "free some, or put results and work on a larger disk; no strategy writes less"
        )


def _words(choice: Choice, settings: dict[str, Any]) -> str:
    """Return the choice for people."""
    why = "the fastest predicted that fits" if settings["strategy"] == "auto" else "as render.strategy says"
    if settings["own_json"] is not None:
        why = "your own"
    saving = "with" if choice.activation_checkpointing else "without"
    return (
        f"{choice.strategy}, {why}; micro-batch {choice.micro_batch} x {choice.accumulation}, {saving} activation "
        f"checkpointing, {choice.attention} attention"
    )


def rendered(choice: Choice, settings: dict[str, Any]) -> tuple[dict[str, Any], list[Reason]]:
    """Return (options of the engine, reasons) for a choice. Raises UserError if it cannot run on the run's hardware."""
    strategy, precision, nvme = STRATEGIES[choice.strategy], settings["precision"], settings["nvme"]
    ranks, local = _ranks(settings), settings["ranks_per_node"]
    check(strategy, settings["device"], ranks, local, nvme, precision)
    if strategy.engine == "ddp":
        reasons = ddp_json(choice.buckets)
    elif strategy.engine == "fsdp":
        reasons = fsdp_json(strategy, ranks, local, precision, choice.activation_checkpointing)
    else:
        _, reasons = strategy_json(strategy, choice.buckets, settings["device"], local, nvme, precision)
        reasons += aio_json() if "nvme" in (strategy.optimizer, strategy.parameters) else []
        reasons += _torch_optimizer()
    return {**nested(reasons), **_from_training(choice, settings)}, reasons


def rendered_own(choice: Choice, settings: dict[str, Any], hidden: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (options of DeepSpeed, overrides) for a user's own JSON that is checked already."""
    config = filled(settings["own_json"], hidden)
    overrides = _override(config, _from_training(choice, settings))
    for key in ("optimizer", "scheduler"):
        if key in config:
            overrides.append({"key": key, "json": config.pop(key), "training": "AdamW and train.schedule"})
    overrides += _override(config, nested(_torch_optimizer()))
    return config, overrides


def training_choice(choice: Choice, precision: Precision, flops: UsefulFlops) -> TrainingChoice:
    """Return what training reads beside the options of its engine."""
    return TrainingChoice(
        engine=STRATEGIES[choice.strategy].engine if choice.strategy in STRATEGIES else "deepspeed",
        strategy=choice.strategy,
        micro_batch=choice.micro_batch,
        accumulation=choice.accumulation,
        activation_checkpointing=choice.activation_checkpointing,
        attention=choice.attention,
        precision=precision,
        flops=flops,
    )


def _torch_optimizer() -> list[Reason]:
    compiled = "the loop's AdamW is torch's own; DeepSpeed's would be compiled for minutes, and often fails to"
    return [
        Reason("zero_allow_untested_optimizer", True, compiled, "DeepSpeed#1127, #5677"),
        Reason("zero_force_ds_cpu_optimizer", False, compiled, f"DeepSpeed#1127; {ENGINE}"),
        Reason("steps_per_print", NEVER, "the loop has a bar of its own", ENGINE),
    ]


def _from_training(choice: Choice, settings: dict[str, Any]) -> dict[str, Any]:
    precision = settings["precision"]
    return {
        "train_micro_batch_size_per_gpu": choice.micro_batch,
        "gradient_accumulation_steps": choice.accumulation,
        "train_batch_size": choice.micro_batch * choice.accumulation * _ranks(settings),
        "gradient_clipping": settings["gradient_clipping"],
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }


def _ranks(settings: dict[str, Any]) -> int:
    return int(settings["nodes"] * settings["ranks_per_node"])


def _override(config: dict[str, Any], training: dict[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """Put `training` into `config` and return what that changed of the user's own values."""
    changed = []
    for key, value in training.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            changed += _override(config.setdefault(key, {}), value, f"{name}.")
            continue
        if key in config and config[key] not in (value, "auto"):
            changed.append({"key": name, "json": config[key], "training": value})
        config[key] = value
    return changed


def lines(reasons: dict[str, Any]) -> str:
    """Return the reasons as lines for people."""
    overrides = [
        f"  {entry['key']}: your JSON says {entry['json']!r}, training says {entry['training']!r}: the latter wins"
        for entry in reasons["overrides"]
    ]
    values = [
        f"  {entry['key'].removeprefix(f'{ZERO}.')} = {entry['value']}: {entry['reason']}"
        for entry in reasons["reasons"]
    ]
    chosen = [f"strategy: {reasons['strategy']}", f"hardware: {reasons['hardware']}", table(reasons["choice"])]
    return "\n".join([*chosen, *overrides, *values])
