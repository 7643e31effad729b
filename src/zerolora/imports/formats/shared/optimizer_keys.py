"""The optimizer and its schedule, by transformers' names."""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import Draft, NoEqual, Rule, text
from zerolora.schedules import ONE_CYCLE, SCHEDULES

OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
    "paged_adamw": "paged_adamw",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion": "lion",
    "lion_32bit": "lion",
    "lion_pytorch": "lion",
    "adamw_torch_8bit": "adamw_torch_8bit",
    "adamw_torch_4bit": "adamw_torch_4bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
}
"""transformers' names (transformers/training_args.py, OptimizerNames), and axolotl's."""
NEAR_OPTIMIZERS = {
    "ao_adamw_4bit": ("adamw_torch_4bit", "its blocks have 128 elements, here 256, as in transformers"),
    "ao_adamw_fp8": ("adamw_torch_8bit", "its moments are fp8, here integer codes of 8 bits"),
}
"""Optimizers with as many bits that quantize in another way."""


def optimizer_rule() -> Rule:
    """Return the rule of an optimizer, by transformers' name."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not isinstance(value, str) or value not in OPTIMIZERS | NEAR_OPTIMIZERS:
            raise NoEqual(f"{shown(value)} has no equal; train.optimizer keeps its default, adamw")
        if value in OPTIMIZERS:
            draft.set("train.optimizer", OPTIMIZERS[value])
            return None
        name, difference = NEAR_OPTIMIZERS[value]
        draft.set("train.optimizer", name)
        return f"{value} is nearest to {name}: {difference}"

    names = (OPTIMIZERS | {old: new for old, (new, _) in NEAR_OPTIMIZERS.items()}).items()
    return Rule("train.optimizer", translate, ", ".join(f"{old} → {new}" for old, new in names if old != new))


def schedule_rule(one_cycle: bool = False) -> Rule:
    """Return the rule of a learning-rate schedule, by transformers' name; with `one_cycle`, the tool has that too."""

    def translate(value: Any, draft: Draft) -> str | None:
        if text(value) not in SCHEDULES or (value == ONE_CYCLE and not one_cycle):
            raise NoEqual(f"{shown(value)} is not a schedule of docs/methods.md; train.schedule keeps its default")
        draft.set("train.schedule", value)
        return None

    return Rule("train.schedule", translate)
