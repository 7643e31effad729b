"""deepspeed: a standalone DeepSpeed JSON, whose stage and offload determine a strategy.

Keys as in deepspeed/runtime/config.py and deepspeed/runtime/zero/config.py (0.19).
"""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    CHANGES,
    Draft,
    Format,
    NoEqual,
    Remark,
    Rule,
    each,
    fact,
    flag,
    idle,
    lost,
    named,
    none,
    number,
    only,
    same,
    text,
    unless_off,
    unlike,
    whole,
)
from zerolora.imports.formats.shared import interval_keys, scaffold, sharding
from zerolora.planner.deepspeed_keys import (
    HONOURED,
    LEFT_OUT,
    OFFLOADS,
    REFUSED,
    ZERO,
    ZERO_KEYS,
    ZERO_REFUSED,
    ZERO_RENAMED,
    ZERO_SECTIONS,
)

OWN = "computed here, with the reason in render.json; to keep yours, set render.strategy: config/deepspeed/NAME.json"
PART_OF = ("stage", "zero_hpz_partition_size", "zero_quantized_weights")
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
ONE_CYCLE = (
    "OneCycle has phases of so many steps, and then falls as 1 / (1 + t); train.schedule: one_cycle, with the rates of "
    "torch's OneCycleLR, is nearest"
)
WARMUP_STEPS = 1000
"""Default of its schedules (deepspeed/runtime/lr_schedules.py)."""
OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "Lion": "lion"}
LOSS_SCALE = "the loss scale of fp16 is DeepSpeed's default"


def _part(path: str) -> Rule:
    """Return the rule of a key that determines the strategy."""

    def translate(value: Any, draft: Draft) -> str | None:
        section = draft.facts.setdefault("zero", {})
        *parents, last = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        return None

    return Rule("render.strategy", translate)


def _unless_auto(rule: Rule) -> Rule:
    """Return a rule that ignores "auto", which stands for the value in the training's own config."""

    def translate(value: Any, draft: Draft) -> str | None:
        return None if value == "auto" else rule.translate(value, draft)

    return Rule(rule.new, translate, rule.remark)


def _precision(name: str) -> Rule:
    def translate(value: Any, draft: Draft) -> str | None:
        if value != "auto" and flag(value):
            draft.set("train.precision", name)
        return None

    return Rule("train.precision", translate)


def _betas(value: Any, draft: Draft) -> str | None:
    if value != "auto":
        if not isinstance(value, list) or len(value) != 2:
            raise NoEqual(f"{shown(value)} is not a pair of numbers")
        draft.set("train.betas", [number(each) for each in value])
    return None


def _schedule() -> Rule:
    rule = named("train.schedule", SCHEDULES)

    def translate(value: Any, draft: Draft) -> str | None:
        if value == "OneCycle":
            raise NoEqual(ONE_CYCLE)
        remark = rule.translate(value, draft)
        draft.facts["schedule"] = value
        return remark

    return Rule(rule.new, translate, rule.remark)


def _warmup(value: Any, draft: Draft) -> str | None:
    draft.facts["warmup"] = value
    if value != "auto":
        draft.set("train.warmup_steps", value)
    return None


def _warmup_shape(value: Any, draft: Draft) -> str | None:
    draft.facts["linear"] = value == "linear"
    if value not in ("linear", "log"):
        raise NoEqual(f"{shown(value)} is none of linear, log")
    return None


def _finish(draft: Draft) -> list[str]:
    lines = ["fetch, prepare: the file names neither model nor rows; correct models/model and data/rows.json"]
    if "schedule" in draft.facts:
        if "warmup" not in draft.facts:
            draft.key = "scheduler.type"
            draft.set("train.warmup_steps", WARMUP_STEPS)
        if not draft.facts.get("linear"):
            text = "scheduler.type: its warm-up is logarithmic there, unless warmup_type is linear"
            lines.append(Remark(f"{text}; here it is linear"))
    draft.key = "zero_optimization"
    try:
        strategy, differs = sharding.strategy_of({"zero_optimization": draft.facts.get("zero", {})})
        draft.set("render.strategy", strategy)
        if differs:
            lines.append(Remark(f"render.strategy: {strategy}, as the JSON describes{differs}", CHANGES))
    except NoEqual as error:
        draft.set("render.strategy", "auto")
        lines.append(Remark(f"render.strategy: auto, since {error}", CHANGES))
    draft.key = ""
    draft.set("fetch.directory.model", {"path": "models/model", "license": "unknown"})
    rows = {"model": "model", "path": "data/rows.json", "too_long": "drop", "check": "exact"}
    draft.config["prepare"] = {"rows": rows}
    return lines + scaffold.scaffold(draft)


def _zero() -> dict[str, Rule]:
    """Return the rules of zero_optimization: keys that determine the strategy, and sizes that are computed here."""
    rules: dict[str, Rule] = {key: idle(OWN) for key in ZERO_KEYS}
    rules |= {key: _part(key) for key in (*PART_OF, "cpu_offload", "cpu_offload_param")}
    rules |= {old: idle(f"deprecated: {new}") for old, new in ZERO_RENAMED.items() if old not in rules}
    rules |= {key: unlike(why) for key, why in ZERO_REFUSED.items()}
    for section, keys in ZERO_SECTIONS.items():
        rules |= {f"{section}.{key}": idle(OWN) for key in sorted(keys)}
    for section in OFFLOADS:
        rules[f"{section}.device"] = _part(f"{section}.device")
        rules[f"{section}.nvme_path"] = unless_off(same("hardware.nvme", text))
    rules["zero_quantized_gradients"] = lost(
        f"gradients are reduced in their own dtype; {sharding.QUANTIZED_GRADIENTS}"
    )
    rules["offload_optimizer.super_offload"] = idle("train.optimizer runs, not DeepSpeed's CPU Adam")
    return {f"{ZERO}.{key}": rule for key, rule in rules.items()}


def _left_out() -> dict[str, Rule]:
    """Return the rules of keys that have no effect or that would change the training."""
    rules = {key: idle(f"here: {why}") for key, why in LEFT_OUT.items()}
    rules |= {key: idle("DeepSpeed's default") for key in HONOURED}
    return rules | {key: unlike(why) for key, why in REFUSED.items()}


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed",
    shared={},
    needed=ZERO,
    defaults={},
    finish=_finish,
    own={
        **_zero(),
        "train_batch_size": idle("train.global_batch; it follows from micro-batch and accumulation"),
        "train_micro_batch_size_per_gpu": _unless_auto(fact("micro_batch", "train.micro_batch", whole)),
        "gradient_accumulation_steps": _unless_auto(
            fact("accumulation", "train.global_batch", whole, "times micro-batch and the number of GPUs")
        ),
        "gradient_clipping": _unless_auto(same("train.gradient_clipping", number)),
        **each("bf16.enabled bfloat16.enabled", _precision("bf16")),
        "fp16.enabled": _precision("fp16"),
        "fp16": idle(LOSS_SCALE),
        **each("bf16 bfloat16", idle("weights and gradients have DeepSpeed's default dtypes")),
        "optimizer.type": named("train.optimizer", OPTIMIZERS),
        "optimizer.params.lr": _unless_auto(same("train.learning_rate", number)),
        "optimizer.params.betas": Rule("train.betas", _betas),
        "optimizer.params.eps": _unless_auto(same("train.epsilon", number)),
        "optimizer.params.weight_decay": _unless_auto(same("train.weight_decay", number)),
        "optimizer.params.torch_adam": idle("the same computation"),
        "optimizer.params.adam_w_mode": only(True, "weight decay is decoupled (AdamW)"),
        "optimizer.params": none("train.optimizer has no such option"),
        "scheduler.type": _schedule(),
        "scheduler.params.warmup_num_steps": Rule("train.warmup_steps", _warmup, f"{WARMUP_STEPS} if left out"),
        "scheduler.params.total_num_steps": _unless_auto(interval_keys.steps("train.max_steps")),
        "scheduler.params.warmup_max_lr": _unless_auto(same("train.learning_rate", number)),
        "scheduler.params.warmup_min_lr": _unless_auto(none("warm-up starts at 0")),
        "scheduler.params.warmup_type": Rule("", _warmup_shape, "always linear here"),
        "scheduler.params": none("train.schedule_options has those of transformers' schedules"),
        "aio": idle("render writes the options of NVMe (docs/choice.md)"),
        **_left_out(),
        "zero_allow_untested_optimizer": idle("set if the optimizer needs it"),
        "zero_force_ds_cpu_optimizer": idle("set if the optimizer needs it"),
        "steps_per_print": idle("every step is logged (docs/telemetry.md)"),
        "comms_logger": idle("telemetry.csv has the bytes of each step"),
        "flops_profiler": idle("telemetry.csv has TFLOP/s"),
        "gradient_allreduce_op": only("mean", "gradients are averaged"),
    },
)
