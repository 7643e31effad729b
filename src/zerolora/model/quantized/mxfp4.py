"""MXFP4, as in gpt-oss: experts in FP4, with a power of two for each 32 of them.

A weight N is stored transposed: N_blocks, [experts, outputs, groups, 16], has two numbers a byte, the first in its
lower half; N_scales, [experts, outputs, groups], has E8M0 exponents. Source: transformers/integrations/mxfp4.py,
_convert_moe_packed_tensors.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerolora.errors import UserError, shown
from zerolora.model.quantized.checkpoint import INSTEAD, Checkpoint, Weight, part
from zerolora.model.quantized.numbers import FP4, power_of_two
from zerolora.tensor_file import StoredTensor

if TYPE_CHECKING:
    import torch

GROUP = 32
CODES, SCALES = "_blocks", "_scales"


def read(checkpoint: Checkpoint) -> None:
    """Add the MXFP4 weights of a checkpoint."""
    checkpoint.stated.only(("quant_method", "modules_to_not_convert", "dequantize"))
    for name, codes in checkpoint.ends(CODES):
        if codes.kind != "U8" or len(codes.shape) != 4 or codes.shape[-1] * 2 != GROUP:
            raise UserError(
                f"{codes.path}: {shown(codes.name)} is {codes.kind} and {list(codes.shape)}; U8 and [experts, outputs, "
                f"groups, {GROUP // 2}] are expected; {INSTEAD}"
            )
        scales = checkpoint.needs(name + SCALES, codes, ("U8",), codes.shape[:-1])
        experts, outputs, groups, _ = codes.shape
        blocks = functools.partial(_blocks, codes, scales)
        checkpoint.weights.append(Weight(name, (experts, groups * GROUP, outputs), (codes, scales), blocks))


def _blocks(codes: StoredTensor, scales: StoredTensor) -> "Iterator[torch.Tensor]":
    """Yield the experts' matrices, [inputs, outputs]."""
    import torch

    values = torch.tensor(FP4)
    for number in range(codes.shape[0]):
        pairs = part(codes, number).read()
        halves = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
        numbers = values[halves.int()].mul_(power_of_two(part(scales, number).read())[..., None])
        yield numbers.flatten(-2).T
