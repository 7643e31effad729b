"""The method, and the quantization of its base."""

import re
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import NO_EFFECT, Draft, NoEqual, Rule, Unlike, fact, flag, text, texts

DORA = fact("dora", "train.method", flag, "true → dora, or qdora")


def _initial(value: Any, draft: Draft) -> str | None:
    if value in (True, "true", "default"):
        return None
    if not isinstance(value, str) or not re.fullmatch(r"pissa(_niter_[0-9]+)?|olora", value):
        raise NoEqual(f"{shown(value)} is not an initialization of zerolora; train.lora.init keeps its default")
    draft.set("train.lora.init", value)
    return None


INITIAL = Rule("train.lora.init", _initial, "true → default")


def targets(value: Any) -> list[str] | str:
    """Return peft's target_modules: all-linear, a list of names, or a regular expression."""
    if value in ("all-linear", ["all-linear"]):
        return "all-linear"
    return text(value) if isinstance(value, str) and "," not in value else texts(value)


def frozen(part: str) -> Rule:
    """Return the rule of a flag that freezes a part beside the language model."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not flag(value):
            raise Unlike(f"false: training the {part}")
        raise NoEqual(f"the {part} is never trained", NO_EFFECT)

    return Rule("", translate, f"true: the {part} is never trained; false stops the import", NO_EFFECT)


def one_of(known: tuple[str, ...], name: str, remark: str) -> Rule:
    """Return the rule of a key that names the method, one of `known`, for `set_method`; others stop the import."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value not in known:
            names = ", ".join(known)
            raise Unlike(f"{shown(value)}, which is none of {names} (docs/methods.md lists what train.method has)")
        draft.facts[name] = value
        return None

    return Rule("train.method", translate, remark)


def set_method(draft: Draft, adapter: bool, quantization: str | None) -> None:
    """Set train.method, and the type of the base's quantization, None for a base in full precision."""
    lora = "dora" if draft.facts.get("dora") else "lora"
    draft.set("train.method", (f"q{lora}" if quantization else lora) if adapter else "full")
    if quantization:
        draft.set("train.quantization.type", quantization)
        if "double" in draft.facts:
            draft.set("train.quantization.double", draft.facts["double"])
