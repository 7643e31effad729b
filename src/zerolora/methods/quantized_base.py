"""The quantization of a QLoRA adapter's base in training, and the rounded weights in computation.

An adapter of a quantized base was trained on weights rounded to 4 or 8 bits, and partly corrects the rounding. Source
of the rounded weights: bitsandbytes/nn/modules.py, Params4bit and Int8Params;
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
from zerolora.model.architecture import stacked_names

if TYPE_CHECKING:
    import torch

TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of precisions."""


@dataclass(frozen=True)
class BaseQuantization:
    """The quantization of training's base, from the adapter's manifest."""

    type: str
    """nf4, fp4 or int8."""
    double: bool
    """Whether the constants of 4 bits are quantized too."""
    precision: str
    """Type of the weights before quantization: fp32, bf16 or fp16."""
    experts: bool = False
    """Whether stacked experts were quantized too. Earlier releases quantized none; their manifests have no such key."""


def was_quantized(adapter: Path) -> bool:
    """Return whether an adapter's manifest records a quantized base."""
    return foreign.adapter_manifest(adapter).get("quantization") is not None


def quantization_of(adapter: Path) -> BaseQuantization:
    """Return the quantization of an adapter's base. Raises UserError if its manifest has none."""
    path, result = adapter / MANIFEST, foreign.adapter_manifest(adapter).get("quantization")
    if result is None:
        raise UserError(
            f"{path}: has no quantization, so it is unknown how the base was quantized; merge into the original base, "
            "or name an adapter that `zerolora stage train` made with method: qlora"
        )
    known = {"type": ("nf4", "fp4", "int8"), "double": (True, False), "precision": tuple(TYPES)}
    known["experts"] = (True, False)
    if isinstance(result, dict):
        result = {"experts": False} | result
    if not isinstance(result, dict) or any(result.get(key) not in values for key, values in known.items()):
        raise UserError(f"{path}: quantization is {shown(result)}; run `zerolora stage train` again, which writes it")
    return BaseQuantization(**{key: result[key] for key in known})


def load_library() -> None:
    """Load bitsandbytes. Raises UserError if it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("the dequantized base needs the package bitsandbytes; install it")
    bitsandbytes_patches.load()


def quantized_weights(model: Any, experts: bool) -> dict[str, bool]:
    """Return the names of the weights that training quantizes, and whether it quantizes the transpose; with `experts`,
    those of stacked experts too."""
    turned = conv1d_paths(model)
    result = {f"{path}.weight": path in turned for path in quantizable_paths(model)}
    return result | dict.fromkeys(stacked_names(model) if experts else (), False)


def round_weights(model: Any, quantization: BaseQuantization) -> None:
    """Quantize and unpack the weights of a loaded model, in place. Raises UserError if bitsandbytes is not
    installed."""
    import torch

    load_library()
    with torch.no_grad():
        for name, transposed in quantized_weights(model, quantization.experts).items():
            weight = model.get_parameter(name)
            weight.copy_(unpacked(weight, quantization, transposed))


def unpacked(weight: "torch.Tensor", quantization: BaseQuantization, transposed: bool = False) -> "torch.Tensor":
    """Return a weight quantized and unpacked; with `transposed`, the weight is [inputs, outputs], and its transpose is
    quantized."""
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
