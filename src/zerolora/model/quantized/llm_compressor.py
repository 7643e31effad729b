"""compressed-tensors, the format of llm-compressor: integers and fp8 with scales, alone or packed in words.

A weight M.weight is stored under its name, as int8 or fp8, or as M.weight_packed beside its shape, M.weight_shape; with
M.weight_scale and, if it is not symmetric, M.weight_zero_point. Packed codes are unsigned, 2^(bits - 1) more than the
integer; packed zeros are packed along the outputs. Source: compressed_tensors/compressors/pack_quantized,
naive_quantized, and compressed_tensors/quantization/quant_args.py, of compressed-tensors 0.20.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError, shown
from zerolora.model.quantized.checkpoint import FLOATS, INSTEAD, Checkpoint, Stated, Weight
from zerolora.model.quantized.numbers import grid, scaled, unpacked, words
from zerolora.tensor_file import StoredTensor

if TYPE_CHECKING:
    import torch

PACKED = "pack-quantized"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
MIXED = "mixed-precision"
IDLE = ("quant_method", "version", "ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio")
IDLE_OF_WEIGHTS = ("dynamic", "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
"""Keys that change no weight: `actorder` says how the codes were found, unless the files have a weight_g_idx, which
no weight takes."""
KINDS = {("int", True): "I32", ("int", False): "I8", ("float", False): "F8_E4M3"}
"""Type of the codes, by the type of the numbers and whether they are packed."""


@dataclass(frozen=True)
class Scheme:
    """How the weights of a group are quantized."""

    kind: str
    bits: int
    symmetric: bool
    strategy: str
    block: tuple[int, int] | None
    """Rows and columns of a scale's block; None for one scale a tensor."""
    packed: bool

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales."""
        return (1, 1) if self.block is None else grid(shape, self._within(shape))

    def _within(self, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = self.block or shape
        return rows, min(columns, shape[1])

    def size(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of a block."""
        return shape if self.block is None else self._within(shape)


def read(checkpoint: Checkpoint) -> None:
    """Add the compressed weights of a checkpoint."""
    schemes = _schemes(checkpoint.stated)
    for end in ("weight_packed", "weight"):
        for module, codes in checkpoint.ends(f".{end}"):
            if end == "weight_packed" or codes.kind in ("I8", "F8_E4M3"):
                _add(checkpoint, module, codes, schemes)


def _schemes(stated: Stated) -> list[Scheme]:
    """Return the schemes of the config's groups, each once."""
    stated.only((*IDLE, "config_groups", "format", "sparsity_config", "transform_config"))
    for key in ("sparsity_config", "transform_config"):
        value = stated.values.get(key) or {}
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            stated.refuse(key, "which computes with other numbers than the stored ones")
    groups = stated.values.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        stated.refuse("config_groups", "and an object of groups is expected")
    named = stated.part("config_groups", groups)
    result = []
    for name, group in groups.items():
        one = named.part(name, group)
        one.only(("targets", "weights", "input_activations", "output_activations", "format"))
        if (weights := group.get("weights")) is not None:
            where = one if group.get("format") is not None else stated
            format_ = where.one_of("format", FORMATS)
            result.append(_scheme(one.part("weights", weights), packed=format_ == PACKED))
    return list(dict.fromkeys(result))


def _scheme(stated: Stated, *, packed: bool) -> Scheme:
    stated.only((*IDLE_OF_WEIGHTS, "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure"))
    kind = stated.one_of("type", ("int",) if packed else ("int", "float"), "int")
    bits = stated.one_of("num_bits", (8,) if kind == "float" else tuple(range(1, 9)), 8)
    size = stated.values.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = inferred if stated.values.get("strategy") is None else stated.values["strategy"]
    blocks: dict[str, Any] = {
        "tensor": None,
        "channel": (1, 1 << 62),
        "group": (1, size),
        "block": stated.values.get("block_structure"),
    }
    if strategy not in blocks:
        stated.refuse("strategy", f"and only {', '.join(blocks)} can be converted to bf16")
    block = blocks[strategy]
    if strategy in ("group", "block") and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    ):
        key = "group_size" if strategy == "group" else "block_structure"
        stated.refuse(key, f"and strategy {strategy} needs its size")
    symmetric = stated.one_of("symmetric", (True, False), True)
    return Scheme(kind, bits, symmetric, strategy, tuple(block) if block else None, packed)


def _add(checkpoint: Checkpoint, module: str, codes: StoredTensor, schemes: Iterable[Scheme]) -> None:
    """Add a weight in the only scheme that its tensors fit. Raises UserError if none does, or several do."""
    scale = checkpoint.needs(f"{module}.weight_scale", codes, FLOATS, None)
    stored = [codes, scale]
    if is_packed := codes.name.endswith("_packed"):
        sizes = checkpoint.needs(f"{module}.weight_shape", codes, ("I64", "I32"), (2,))
        rows, columns = (int(each) for each in sizes.read())
        stored.append(sizes)
    elif len(codes.shape) == 2:
        rows, columns = codes.shape
    else:
        raise UserError(f"{codes.path}: {shown(codes.name)} is {list(codes.shape)}, and no matrix; {INSTEAD}")
    shape = rows, columns
    zero = checkpoint.stored.get(f"{module}.weight_zero_point")
    fitting = [each for each in schemes if each.packed == is_packed and _fits(each, shape, codes, scale, zero)]
    if len(fitting) != 1:
        zeros = "" if zero is None else f" and zeros {zero.kind} {list(zero.shape)}"
        raise UserError(
            f"{codes.path}: {shown(codes.name)}, {codes.kind} {list(codes.shape)}, with scales {list(scale.shape)}"
            f"{zeros}, fits {'several' if fitting else 'none'} of {checkpoint.stated.key}.config_groups; {INSTEAD}"
        )
    if zero is not None:
        stored.append(zero)
    blocks = functools.partial(_blocks, fitting[0], shape, codes, scale, zero)
    checkpoint.weights.append(Weight(f"{module}.weight", shape, tuple(stored), blocks))


def _fits(
    scheme: Scheme, shape: tuple[int, int], codes: StoredTensor, scale: StoredTensor, zero: StoredTensor | None
) -> bool:
    """Return whether a weight's tensors have the types and shapes that a scheme has."""
    scales = scheme.grid(shape)
    stored = (shape[0], words(shape[1], scheme.bits)) if scheme.packed else shape
    # Releases before 0.19 left the upper bits of a word empty if the bits do not divide 32, which no key states.
    whole = not scheme.packed or 32 % scheme.bits == 0
    fits = codes.kind == KINDS.get((scheme.kind, scheme.packed)) and codes.shape == stored and whole
    fits &= scale.shape == scales or (scheme.block is None and scale.shape in ((), (1,)))
    if scheme.symmetric or zero is None:
        return fits and scheme.symmetric and zero is None
    if scheme.packed:
        return fits and zero.kind == "I32" and zero.shape == (words(scales[0], scheme.bits), scales[1])
    return fits and zero.kind == "I8" and zero.shape == scale.shape


def _blocks(
    scheme: Scheme, shape: tuple[int, int], codes: StoredTensor, scale: StoredTensor, zero: StoredTensor | None
) -> "Iterator[torch.Tensor]":
    scales = scheme.grid(shape)
    offset = 1 << (scheme.bits - 1)
    zeros = None
    if zero is not None:
        zeros = zero.read().reshape(scales) if not scheme.packed else None
        if scheme.packed:
            zeros = unpacked(zero.read().T, scheme.bits, scales[0]).T - offset

    def rows(first: int, last: int) -> "torch.Tensor":
        read = codes.read(first, last)
        return unpacked(read, scheme.bits, shape[1]) - offset if scheme.packed else read

    yield from scaled(shape, scheme.size(shape), rows, scale.read().float().reshape(scales), zeros)
