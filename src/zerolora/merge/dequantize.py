"""Updates of an adapter of QLoRA that is merged into the base weights as training quantized them.

Added to the original weights, the adapter meets others than it was trained on (methods/quantized_base.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.merge.stream import apply
from zerolora.methods.method import Update
from zerolora.methods.quantized_base import (
    BaseQuantization,
    load_library,
    quantization_of,
    quantized_weights,
    unpacked,
)

if TYPE_CHECKING:
    import torch


def requantized(updates: Mapping[str, Update], adapters: Sequence[Path], model: Any) -> dict[str, Update]:
    """Return updates that begin with the weights as training quantized them, of all modules that were quantized.

    Raises UserError if an adapter does not say how, two say different things, or bitsandbytes is not installed.
    """
    first, *others = adapters
    quantization = quantization_of(first)
    for other in others:
        if (its := quantization_of(other)) != quantization:
            raise UserError(
                f"--dequantized: {other} was trained on a base quantized as {_described(its)}, and {first} as "
                f"{_described(quantization)}; merge them into the original base, or one by itself"
            )
    load_library()
    return dict(updates) | {
        name: Requantized(quantization, updates.get(name), transposed)
        for name, transposed in quantized_weights(model).items()
    }


def _described(quantization: BaseQuantization) -> str:
    return ", ".join(f"{key} {value}" for key, value in asdict(quantization).items())


@dataclass(frozen=True)
class Requantized(Update):
    """A weight that is quantized and unpacked, and then updated."""

    quantization: BaseQuantization
    update: Update | None
    transposed: bool
    """The weight is [inputs, outputs]; its transpose was quantized."""

    @property
    def by_rows(self) -> bool:
        """False: blocks of a 4-bit weight cross rows, and their constants are quantized together."""
        return False

    def check(self, shape: tuple[int, ...]) -> None:
        if self.update:
            self.update.check(shape)

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        """Quantize and unpack, then update."""
        rows.copy_(unpacked(rows, self.quantization, self.transposed))
        if self.update:
            apply(self.update, rows, first)
