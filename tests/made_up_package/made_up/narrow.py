"""narrow: LoRA of the attention's queries and values alone, with one setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from zerolora.methods.lora import LoraMethod

TARGETS = ("q_proj", "v_proj")


@dataclass(frozen=True)
class NarrowMethod(LoraMethod):
    """LoRA of two projections."""

    name: ClassVar[str] = "narrow"
    meaning: ClassVar[Mapping[str, str]] = {**LoraMethod.meaning, "r": "narrow.r", "lora_alpha": "narrow.r"}
    sections: ClassVar[tuple[str, ...]] = ("narrow",)

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Return the method with the settings of train.narrow."""
        return cls(r=settings.narrow.r, targets=TARGETS)

    @classmethod
    def build(cls, model: Any, settings: Any, rows: Sequence[int] = ()) -> Any:
        """Build it as LoRA with these settings."""
        from zerolora.config.method_sections import Lora, MethodSections

        lora = Lora(r=settings.narrow.r, alpha=2.0 * settings.narrow.r, targets=[*TARGETS])
        return super().build(model, MethodSections(lora=lora), rows)
