"""QDoRA: DoRA (arXiv 2402.09353) on a base model whose linear modules are quantized (QLoRA, arXiv 2305.14314).

The norms are of the quantized weights, which peft unpacks in every pass (peft/tuners/lora/dora.py).
"""

from dataclasses import dataclass
from typing import ClassVar

from zerolora.methods.dora import DoraMethod
from zerolora.methods.qlora import QloraMethod


@dataclass(frozen=True)
class QdoraMethod(DoraMethod, QloraMethod):
    """DoRA's adapter and forward pass, QLoRA's base model."""

    name: ClassVar[str] = "qdora"

    @property
    def unpacks(self) -> bool:
        """True, for the norms."""
        return True

    @property
    def reads_whole(self) -> bool:
        """True: peft unpacks each weight for its first norms."""
        return True
