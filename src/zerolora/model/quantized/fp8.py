"""fp8 weights with scales: of blocks (DeepSeek-V3), rows, or the whole weight (AutoFP8, FBGEMM).

A weight N is stored as fp8 beside N_scale_inv or N_scale, by which it is multiplied. Sources:
transformers/integrations/finegrained_fp8.py, Fp8Dequantize; DeepSeek-V3/inference/kernel.py, weight_dequant, in which
the blocks at the edges of a matrix are smaller; vllm/model_executor/layers/quantization/{fp8,fbgemm_fp8}.py.
"""

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerolora.errors import UserError, shown
from zerolora.model.quantized.checkpoint import FLOATS, INSTEAD, Checkpoint, Weight, part
from zerolora.model.quantized.numbers import grid, read_scale, scaled
from zerolora.tensor_file import StoredTensor

if TYPE_CHECKING:
    import torch

KINDS = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2"}
SCALES = ("_scale_inv", "_scale")
IDLE = (
    *("quant_method", "activation_scheme", "activation_scale_ub", "modules_to_not_convert", "ignored_layers"),
    *("modules_to_convert", "kv_cache_scheme", "dequantize"),
)
"""Keys that change no weight: which weights are fp8 is seen by their type."""


def read(checkpoint: Checkpoint) -> None:
    """Add the fp8 weights of a checkpoint."""
    stated = checkpoint.stated
    stated.only((*IDLE, "fmt", "weight_block_size", "scale_fmt"))
    kinds = (KINDS[stated.one_of("fmt", KINDS)],) if "fmt" in stated.values else tuple(KINDS.values())
    bytes_ = stated.one_of("scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    block = stated.values.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    ):
        stated.refuse("weight_block_size", "and two numbers are expected, the rows and columns of a block")
    for name, codes in checkpoint.stored.items():
        if codes.kind not in kinds:
            continue
        names = [name + end for end in SCALES if name + end in checkpoint.stored]
        if len(names) > 1:
            raise UserError(f"{codes.path}: {shown(name)} has two scales, {' and '.join(names)}; {INSTEAD}")
        own = names[0] if names else name + SCALES[0]
        scale = checkpoint.needs(own, codes, (*FLOATS, "F8_E8M0", *(("U8",) if bytes_ else ())), None)
        size = _block(checkpoint, codes, scale, tuple(block) if block else None)
        blocks = functools.partial(_blocks, codes, scale, size)
        checkpoint.weights.append(Weight(name, codes.shape, (codes, scale), blocks))


def _block(
    checkpoint: Checkpoint, codes: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the rows and columns of a scale's block. Raises UserError if the scales are not those of such blocks."""
    outer, (rows, columns) = codes.shape[:-2], _matrix(codes)
    if block is not None:
        checkpoint.needs(scale.name, codes, (scale.kind,), (*outer, *grid((rows, columns), block)))
        return block
    if not outer and math.prod(scale.shape) == 1:
        return rows, columns
    by: dict[tuple[int, ...], tuple[int, int]] = {
        (rows, 1): (1, columns),
        (1, columns): (rows, 1),
        (1, 1): (rows, columns),
    }
    if scale.shape[:-2] != outer or (found := by.get(scale.shape[-2:])) is None:
        raise UserError(
            f"{scale.path}: {shown(scale.name)} is {list(scale.shape)} for {list(codes.shape)}, and "
            f"{checkpoint.stated.key} has no weight_block_size; one scale, or one a row or column, is expected; "
            f"{INSTEAD}"
        )
    return found


def _matrix(codes: StoredTensor) -> tuple[int, int]:
    rows, columns = (1, 1, *codes.shape)[-2:]
    return rows, columns


def _blocks(codes: StoredTensor, scale: StoredTensor, block: tuple[int, int]) -> "Iterator[torch.Tensor]":
    """Yield the numbers of a matrix, or of matrices that are stacked, as experts are."""
    if len(codes.shape) > 2:
        for number in range(codes.shape[0]):
            yield from _blocks(part(codes, number), part(scale, number), block)
        return
    shape = _matrix(codes)
    yield from scaled(shape, block, codes.read, read_scale(scale, grid(shape, block)), None)
