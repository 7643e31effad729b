"""The method, and the quantization of its base."""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import Draft, Rule, Unlike, fact, flag

DORA = fact("dora", "train.method", flag, "true → dora, or qdora")


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
