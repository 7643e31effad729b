"""The precision of a training, its attention and its kernels."""

from collections.abc import Mapping
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import NO_EFFECT, Draft, NoEqual, Rule, flag


def precision(name: str) -> Rule:
    """Return the rule of `bf16` or `fp16`, for `set_precision`."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value not in (True, False, "auto", "full"):
            raise NoEqual(f"{shown(value)} is none of true, false, auto")
        draft.facts[name] = value
        return None

    return Rule("train.precision", translate)


def pure(name: str) -> Rule:
    """Return the rule of a flag for training with 16-bit weights."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not flag(value):
            return None
        draft.facts[name] = True
        return f"trained weights are {name} there, fp32 here"

    return Rule("train.precision", translate, f"true → {name}; trained weights stay fp32")


def set_precision(draft: Draft) -> bool:
    """Set train.precision from `bf16` and `fp16`; return whether the file disables both."""
    chosen = [name for name in ("bf16", "fp16") if draft.facts.get(name) in (True, "full")]
    if chosen:
        draft.key = chosen[0]
        draft.set("train.precision", chosen[0])
    return not chosen and draft.facts.get("bf16") is False and draft.facts.get("fp16", False) is False


def attention(names: Mapping[str, str]) -> Rule:
    """Return the rule of an attention implementation; an empty name is the default."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not isinstance(value, str) or value not in names:
            raise NoEqual(f"{shown(value)} has no equal; train.attention stays auto", NO_EFFECT)
        if names[value]:
            draft.set("train.attention", names[value])
        return None

    renamed = ", ".join(f"{old} → {new}" for old, new in names.items() if new not in ("", old))
    return Rule("train.attention", translate, renamed)


def kernels(value: Any, draft: Draft) -> str | None:
    """Translate a flag that turns liger-kernel's kernels on, which these tools too leave out where a model has none."""
    draft.set("train.kernels", "auto" if flag(value) else "off")
    return None


LIGER = Rule("train.kernels", kernels, "true → auto, false → off")
