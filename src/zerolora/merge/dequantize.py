"""The base weights as training quantized them, for an adapter of QLoRA that is merged into those.

An adapter of a quantized base has learned on weights that were rounded to 4 or 8 bits, and on what that rounding lost.
Added to the original weights it meets others. Source of what a pass computes with: bitsandbytes/nn/modules.py,
Params4bit and Int8Params; transformers/integrations/bitsandbytes.py, Bnb4bitQuantize.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.compat import bitsandbytes
from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, read_object
from zerolora.merge.stream import apply
from zerolora.methods.base import Update
from zerolora.methods.peft_format import conv1d_paths, quantizable_paths

if TYPE_CHECKING:
    import torch

TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's name of the precision that weights were read in."""


@dataclass(frozen=True)
class BaseQuantization:
    """How training quantized its base, as the adapter's manifest has it."""

    type: str
    """nf4, fp4 or int8."""
    double: bool
    """The constants of 4 bits are quantized too."""
    precision: str
    """In which weights were read before: fp32, bf16 or fp16."""


def quantization_of(adapter: Path) -> BaseQuantization:
    """Return how the base of an adapter was quantized. Raises UserError if its manifest does not say."""
    path = adapter / MANIFEST
    manifest = read_object(path, "zerolora train") if path.is_file() else {}
    found = manifest.get("quantization")
    if found is None:
        raise UserError(
            f"{path}: has no quantization, so nothing says how the base was quantized; merge into the original base, "
            "or name an adapter that `zerolora train` made with method: qlora"
        )
    known = {"type": ("nf4", "fp4", "int8"), "double": (True, False), "precision": tuple(TYPES)}
    if not isinstance(found, dict) or any(found.get(key) not in values for key, values in known.items()):
        raise UserError(f"{path}: quantization is {shown(found)}; run `zerolora train` again, which writes it")
    return BaseQuantization(**{key: found[key] for key in known})


def requantized(updates: Mapping[str, Update], adapter: Path, model: Any) -> dict[str, Update]:
    """Return updates that begin with the weights as training quantized them, of all modules that were quantized.

    Raises UserError if the adapter does not say how, or bitsandbytes is not installed.
    """
    quantization = quantization_of(adapter)
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("merging into the dequantized base needs the package bitsandbytes; install it")
    bitsandbytes.load()
    turned = conv1d_paths(model)
    names = {f"{path}.weight": path in turned for path in quantizable_paths(model)}
    return dict(updates) | {
        name: Requantized(quantization, updates.get(name), transposed) for name, transposed in names.items()
    }


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
        weight = rows.T.contiguous() if self.transposed else rows
        unpacked = _unpacked(weight, self.quantization)
        rows.copy_(unpacked.T if self.transposed else unpacked)
        del weight, unpacked
        if self.update:
            apply(self.update, rows, first)


def _unpacked(weight: "torch.Tensor", quantization: BaseQuantization) -> "torch.Tensor":
    import torch
    from bitsandbytes import functional

    if quantization.type == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        # As bitsandbytes/autograd/_functions.py, MatMul8bitFp, which trains on CPUs; on a GPU the products are int8.
        unpacked: torch.Tensor = codes.float() * scales.unsqueeze(1).mul(1.0 / 127.0)
        return unpacked
    read = weight.to(getattr(torch, TYPES[quantization.precision]))
    codes, state = functional.quantize_4bit(
        read, compress_statistics=quantization.double, quant_type=quantization.type, blocksize=64
    )
    return functional.dequantize_4bit(codes, state)
