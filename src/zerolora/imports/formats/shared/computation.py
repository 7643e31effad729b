"""The precision of a training, its attention and its kernels."""

from collections.abc import Mapping
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import NO_EFFECT, Draft, NoEqual, Remark, Rule, flag


def precision(name: str) -> Rule:
    """Return the rule of `bf16` or `fp16`, for `set_precision`."""

    def translate(value: Any, draft: Draft) -> str | None:
        if value not in (True, False, "auto", "full"):
            raise NoEqual(f"{shown(value)} is none of true, false, auto")
        draft.facts[name] = value
        return None

    return Rule("train.precision", translate)


def pure(name: str) -> Rule:
    """Return the rule of a flag for training with 16-bit weights, for `set_weights`."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not flag(value):
            return None
        draft.facts[name] = True
        draft.facts["pure"] = (draft.key, name)
        return None

    return Rule("train.precision, train.weights", translate, f"true → {name}")


def set_weights(draft: Draft, unsharded: str = "") -> list[str]:
    """Set train.weights from `pure`, or from `unsharded`, the type of trained weights that neither DeepSpeed nor FSDP
    keeps in fp32; return a line for weights of another type. After `set_strategy`."""
    key, kind = draft.facts.get("pure", ("", unsharded))
    ddp = draft.config["render"]["strategy"] == "ddp"
    if kind == "bf16" and ddp:
        draft.key = key
        draft.set("train.weights", kind)
    elif key:
        return [Remark(f"{key}: trained weights are {kind} there, fp32 here")]
    return []


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
