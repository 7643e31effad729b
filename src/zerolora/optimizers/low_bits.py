"""AdamW of torchao, uncompiled and in pieces, and the fp32 values of its moments of 8 and 4 bits.

torchao compiles the update of a tensor for each shape: half a minute of one core for the shapes of an adapter, and a
compiler. Here the same function runs uncompiled on pieces of a tensor, so that its temporary tensors are small.
Sources: torchao/optim/adam.py, subclass_8bit.py, subclass_4bit.py and quant_utils.py.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from zerolora.compat.left_out import brought_in

BLOCK = 256  # elements that share an fp32 scale, also of 4 bits in transformers (trainer_optimizer.py)
SMALLEST = 4096  # elements of the smallest tensor whose moments are quantized (_new_buffer)
PIECE = 2**22  # elements updated at once; a multiple of BLOCK
LEAST = 1e-12  # the smallest scale (scale_tensor)
ULPS = (0, -1, 1, -2, 2)
"""Distances from a computed scale at which `encode` tries others."""
MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Any]
Codebooks = dict[str, torch.Tensor]
"""By moment, the fp32 values of its codes."""


class Library(NamedTuple):
    """Modules of torchao."""

    adam: ModuleType
    bits8: ModuleType
    bits4: ModuleType
    quantizing: ModuleType


@functools.cache
def library() -> Library:
    """Return torchao's modules; a training process otherwise leaves torchao out."""
    with brought_in("torchao"):
        from torchao.optim import adam, quant_utils, subclass_4bit, subclass_8bit
    for module in (subclass_8bit, subclass_4bit):
        module.get_qmap_signed(), module.get_qmap_unsigned()  # cached; they read values of tensors
    return Library(adam, subclass_8bit, subclass_4bit, quant_utils)


@functools.cache
def low_bit_adamw(bits: int) -> Callable[..., torch.optim.Optimizer]:
    """Return torchao's class, whose step is uncompiled."""
    adam = library().adam
    base: Any = adam.AdamW8bit if bits == 8 else adam.AdamW4bit

    class LowBitAdamW(base):  # type: ignore[misc]  # torchao has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.books: dict[torch.device, Codebooks] = {}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                rate = torch.as_tensor(group["lr"], dtype=torch.float32)  # as torchao stores it
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        state = self.state[tensor]
                        if not state:
                            start(state, tensor, bits, 0)
                        state["step"] += 1
                        if tensor.device not in self.books:
                            self.books[tensor.device] = _codebooks(bits, tensor.device)
                        _update(tensor, state, rate, group, self.books[tensor.device], bits)

    return LowBitAdamW


def start(state: State, tensor: torch.Tensor, bits: int, updates: int) -> None:
    """Reset a tensor's state to that before the first step, with `updates` updates; in place if it exists."""
    if not state:
        state["step"] = torch.tensor(0.0)
        for name in MOMENTS:
            if tensor.numel() < SMALLEST:
                state[name] = torch.zeros_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
                continue
            # The last block may be shorter; torchao leaves such tensors in fp32, as most partitions of ZeRO would be.
            blocks = -(-tensor.numel() // BLOCK)
            codes = torch.zeros(blocks * BLOCK * bits // 8, dtype=torch.uint8, device=tensor.device)
            state |= {f"{name}_codes": codes, f"{name}_scales": torch.zeros(blocks, device=tensor.device)}
    for each in state.values():
        each.zero_()  # a scale of zero makes every code zero
    state["step"].fill_(updates)


def decoded(state: State, name: str, shape: torch.Size, bits: int) -> torch.Tensor:
    """Return a quantized moment in fp32."""
    value = torch.empty(shape, device=state[f"{name}_codes"].device)
    books, flat = _codebooks(bits, value.device), value.view(-1)
    for piece in _pieces(len(flat)):
        flat[piece] = _moment(state, name, piece, books, bits).dequantize()[: piece.stop - piece.start]
    return value


def encode(state: State, name: str, value: torch.Tensor, bits: int) -> None:
    """Write fp32 values to a quantized moment, so that values from `decoded` are decoded to the same bytes.

    torchao scales a block by its largest magnitude. As the signed maps have no code for -1, a block whose largest value
    is negative would become smaller each time; and dividing by a code may miss the scale by a rounding.
    """
    books, flat = _codebooks(bits, value.device), value.reshape(-1)
    for piece in _pieces(len(flat)):
        moment = _moment(state, name, piece, books, bits)
        blocks = _padded(flat[piece]).view(-1, BLOCK)
        largest, lowest = blocks.amax(1), -blocks.amin(1)
        scales = torch.where(largest > lowest, largest, lowest / -moment.qmap.min()) if moment.signed else largest
        scales = scales.clip(LEAST)
        chosen, remaining = scales, torch.ones_like(scales, dtype=torch.bool)
        for ulps in ULPS:
            tried = _shifted(scales, ulps)
            same = (_with_scales(blocks, tried, moment, bits)[1] == blocks).all(1)
            chosen = torch.where(same & remaining, tried, chosen)
            remaining &= ~same
        empty = ~blocks.any(1)  # not LEAST: 4 bits of the second moment have no code for zero
        codes, _ = _with_scales(blocks, chosen, moment, bits)
        codes = torch.where(empty.unsqueeze(1), 0, codes).view(-1)
        moment.codes.copy_(codes if bits == 8 else codes[::2] << 4 | codes[1::2])
        moment.scale.copy_(torch.where(empty, 0.0, chosen))


def _with_scales(
    blocks: torch.Tensor, scales: torch.Tensor, moment: Any, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of blocks with given scales, and the values that these stand for."""
    quantizing = library().quantizing
    quantize = quantizing.quantize_8bit_with_qmap if bits == 8 else quantizing.quantize_4bit_with_qmap
    codes: torch.Tensor = quantize(blocks / scales.unsqueeze(1), moment.qmap)
    values: torch.Tensor = quantizing.dequant_with_qmap(codes, moment.qmap, scales)
    return codes, values


def _shifted(scales: torch.Tensor, ulps: int) -> torch.Tensor:
    towards = torch.full_like(scales, float("inf") if ulps > 0 else 0.0)
    for _ in range(abs(ulps)):
        scales = scales.nextafter(towards)
    return scales


def _update(
    tensor: torch.Tensor, state: State, rate: torch.Tensor, group: dict[str, Any], books: Codebooks, bits: int
) -> None:
    """Update a tensor and its moments by torchao's function."""
    assert tensor.grad is not None
    weights, gradients = tensor.detach().view(-1), tensor.grad.reshape(-1)
    packed = tensor.numel() >= SMALLEST
    for piece in _pieces(len(weights)):
        weight, gradient = weights[piece], gradients[piece]
        if packed:
            weight, gradient = _padded(weight), _padded(gradient)
            moments = [_moment(state, name, piece, books, bits) for name in MOMENTS]
        else:
            moments = [state[name].view(-1)[piece] for name in MOMENTS]
        library().adam.single_param_adam(
            weight,
            gradient,
            state["step"],
            *moments,
            None,
            rate,
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            IS_ADAMW=True,
            BF16_STOCHASTIC_ROUND=False,
        )
        if len(weight) != piece.stop - piece.start:
            weights[piece] = weight[: piece.stop - piece.start]


def _pieces(elements: int) -> Iterator[slice]:
    for first in range(0, elements, PIECE):
        yield slice(first, min(first + PIECE, elements))


def _padded(flat: torch.Tensor) -> torch.Tensor:
    """Return values followed by zeros up to whole blocks; themselves if there is nothing to add."""
    missing = -len(flat) % BLOCK
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _moment(state: State, name: str, piece: slice, books: Codebooks, bits: int) -> Any:
    """Return a piece of a moment as torchao's tensor, sharing memory."""
    blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
    bytes_of_block = BLOCK * bits // 8
    codes = state[f"{name}_codes"][blocks.start * bytes_of_block : blocks.stop * bytes_of_block]
    scales, signed = state[f"{name}_scales"][blocks], name == MOMENTS[0]
    if bits == 8:
        return library().bits8.OptimState8bit(codes, scales, books[name], signed, dtype=torch.float32)
    shape = (len(scales) * BLOCK,)
    return library().bits4.OptimState4bit(codes, scales, books[name], signed, shape, dtype=torch.float32)


def _codebooks(bits: int, device: torch.device) -> Codebooks:
    module = library().bits8 if bits == 8 else library().bits4
    values = module.get_qmap_signed(), module.get_qmap_unsigned()
    return {name: torch.tensor(each, device=device) for name, each in zip(MOMENTS, values, strict=True)}
