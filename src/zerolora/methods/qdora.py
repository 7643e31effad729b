"""QDoRA: DoRA (arXiv 2402.09353) on a base model whose linear modules are quantized (QLoRA, arXiv 2305.14314).

The norms are of the quantized weights, which peft unpacks in every pass (peft/tuners/lora/dora.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from zerolora.config.section import Fault
from zerolora.methods.dora import DoraMethod
from zerolora.methods.qlora import QloraMethod

if TYPE_CHECKING:
    from zerolora.config.method_sections import MethodSections


@dataclass(frozen=True)
class QdoraMethod(DoraMethod, QloraMethod):
    """DoRA's adapter and forward pass, QLoRA's base model."""

    name: ClassVar[str] = "qdora"

    @classmethod
    def faults(cls, settings: "MethodSections") -> Iterator[Fault]:
        """Yield type int8, and what QLoRA does not support."""
        if settings.quantization.type == "int8":
            text = "int8 with method qdora, whose norms peft cannot compute before the first forward pass"
            yield ("quantization", "type"), f"{text} of an int8 module; use nf4, or method: qlora"
        yield from super().faults(settings)

    @property
    def unpacks(self) -> bool:
        """True, for the norms."""
        return True

    @property
    def reads_whole(self) -> bool:
        """True: peft unpacks each weight for its first norms."""
        return True
