"""Numbers in quantized checkpoints: codes packed in 32-bit words, FP4, and scales of blocks."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from zerolora.model.quantized.checkpoint import spans
from zerolora.tensor_file import StoredTensor

if TYPE_CHECKING:
    import torch

WORD = 32
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of E2M1 by code (OCP Microscaling Formats, 5.3.3)."""
EXPONENT_BIAS = 127
"""Of E8M0 (OCP Microscaling Formats, 5.4.1)."""
Rows = Callable[[int, int], "torch.Tensor"]


def words(count: int, bits: int) -> int:
    """Return the number of 32-bit words of this many codes."""
    return -(-count * bits // WORD)


def unpacked(packed: "torch.Tensor", bits: int, count: int) -> "torch.Tensor":
    """Return unsigned codes, [rows, count], of 32-bit words, [rows, words], which are filled from their lowest bit,
    without gaps: a code may begin in a word and end in the next."""
    import torch

    highest = (1 << bits) - 1
    if WORD % bits == 0:
        return ((packed[..., None] >> torch.arange(0, WORD, bits, dtype=torch.int32)) & highest).flatten(1)[:, :count]
    position = torch.arange(count) * bits
    at, shift = position // WORD, position % WORD
    low = packed.to(torch.int64) & 0xFFFFFFFF
    wide = low[:, at] | low[:, (at + 1).clamp(max=packed.shape[1] - 1)] << WORD
    return ((wide >> shift) & highest).to(torch.int32)


def grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix, one a block; blocks at the edges may be smaller."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def scaled(
    shape: tuple[int, int], block: tuple[int, int], codes: Rows, scale: "torch.Tensor", zero: "torch.Tensor | None"
) -> "Iterator[torch.Tensor]":
    """Yield the rows of a matrix, (code - zero) · scale in fp32, where `scale` and `zero` have one number a block."""
    for first, last in spans(*shape, block[0] if block[0] < shape[0] else 1):
        value = codes(first, last).float()
        if zero is not None:
            value -= spread(zero, block, first, last, shape[1])
        yield value.mul_(spread(scale, block, first, last, shape[1]))


def spread(values: "torch.Tensor", block: tuple[int, int], first: int, last: int, columns: int) -> "torch.Tensor":
    """Return the number of each element in rows `first` to `last`, of one number a block, in fp32."""
    import torch

    rows = values[torch.arange(first, last) // block[0]].float()
    return rows.repeat_interleave(block[1], 1)[:, :columns] if block[1] < columns else rows


def power_of_two(exponents: "torch.Tensor") -> "torch.Tensor":
    """Return the scales that bytes of E8M0 state, in fp32. 255 is not a number, and infinite here."""
    import torch

    return torch.exp2(exponents.view(torch.uint8).float() - EXPONENT_BIAS)


def read_scale(stored: StoredTensor, shape: tuple[int, int]) -> "torch.Tensor":
    """Return the scales of a matrix, fp32 or E8M0, in the shape of their grid."""
    read = stored.read()
    return (power_of_two(read) if stored.kind in ("U8", "F8_E8M0") else read.float()).reshape(shape)
