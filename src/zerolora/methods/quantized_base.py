"""How training quantized the base of a QLoRA adapter, and the weights that it computed with.

An adapter of a quantized base has learned on weights that were rounded to 4 or 8 bits, and on what that rounding lost.
Source of what a pass computes with: bitsandbytes/nn/modules.py, Params4bit and Int8Params;
transformers/integrations/bitsandbytes.py, Bnb4bitQuantize.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.compat import bitsandbytes_patches
from zerolora.compat.transformers_patches import quantizable_paths
from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST
from zerolora.methods.peft_format import conv1d_paths
from zerolora.model import foreign

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


def was_quantized(adapter: Path) -> bool:
    """Tell whether the manifest of an adapter says that its base was quantized."""
    return foreign.adapter_manifest(adapter).get("quantization") is not None


def quantization_of(adapter: Path) -> BaseQuantization:
    """Return how the base of an adapter was quantized. Raises UserError if its manifest does not say."""
    path, result = adapter / MANIFEST, foreign.adapter_manifest(adapter).get("quantization")
    if result is None:
        raise UserError(
            f"{path}: has no quantization, so it is unknown how the base was quantized; merge into the original base, "
            "or name an adapter that `zerolora train` made with method: qlora"
        )
    known = {"type": ("nf4", "fp4", "int8"), "double": (True, False), "precision": tuple(TYPES)}
    if not isinstance(result, dict) or any(result.get(key) not in values for key, values in known.items()):
        raise UserError(f"{path}: quantization is {shown(result)}; run `zerolora train` again, which writes it")
    return BaseQuantization(**{key: result[key] for key in known})


def load_library() -> None:
    """Load bitsandbytes. Raises UserError if it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("the dequantized base needs the package bitsandbytes; install it")
    bitsandbytes_patches.load()


def quantized_weights(model: Any) -> dict[str, bool]:
    """Return the names of the weights of a model that training quantizes, and whether the transpose was quantized."""
    turned = conv1d_paths(model)
    return {f"{path}.weight": path in turned for path in quantizable_paths(model)}


def round_weights(model: Any, quantization: BaseQuantization) -> None:
    """Give a loaded model the weights that training computed with: quantized, and unpacked again. Raises UserError if
    bitsandbytes is not installed."""
    import torch

    load_library()
    with torch.no_grad():
        for name, transposed in quantized_weights(model).items():
            weight = model.get_parameter(name)
            weight.copy_(unpacked(weight, quantization, transposed))


def unpacked(weight: "torch.Tensor", quantization: BaseQuantization, transposed: bool = False) -> "torch.Tensor":
    """Return a weight after it was quantized; with `transposed`, it is [inputs, outputs] and its transpose was."""
    import torch
    from bitsandbytes import functional

    if transposed:
        return unpacked(weight.T.contiguous(), quantization).T
    if quantization.type == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        # As bitsandbytes/autograd/_functions.py, MatMul8bitFp, which trains on CPUs; on a GPU the products are int8.
        return torch.as_tensor(codes.float() * scales.unsqueeze(1).mul(1.0 / 127.0))
    read = weight.to(getattr(torch, TYPES[quantization.precision]))
    codes, state = functional.quantize_4bit(
        read, compress_statistics=quantization.double, quant_type=quantization.type, blocksize=64
    )
    return functional.dequantize_4bit(codes, state)
