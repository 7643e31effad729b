"""compressed_tensors: the merged model with weights in 8 or 4 bits, in vLLM's own format, made by llm-compressor."""

import importlib.util
from pathlib import Path
from typing import Any

from zerolora.config.target_sections import CompressedTensors
from zerolora.errors import UserError
from zerolora.export import opened
from zerolora.export.linear_layers import Layers, linear_layers
from zerolora.export.targets.target import ExportTarget, Opened, RunResult

PACKAGES = ("llmcompressor", "compressed_tensors")
INSTALL = "pip install --no-deps llmcompressor==0.14.0 compressed-tensors==0.20.0 loguru"


def _check(source: RunResult, settings: CompressedTensors) -> None:
    if not all(importlib.util.find_spec(each) for each in PACKAGES):
        raise UserError(
            f"export.targets: compressed_tensors is made by llm-compressor, which is not installed; {INSTALL}, or "
            "export torchao, which does not need it"
        )
    _layers(source, settings)


def _layers(source: RunResult, settings: CompressedTensors) -> Layers:
    multiple = settings.group_size if settings.type == "int4" else 1
    return linear_layers(source.merged_model, "export.compressed_tensors.group_size", inputs=multiple)


def _run(source: RunResult, settings: CompressedTensors, output: Path) -> dict[str, Any]:
    """Quantize the merged model file by file, by rounding, without calibration."""
    from llmcompressor import model_free_ptq
    from loguru import logger

    logger.disable("llmcompressor")  # it logs each copied file
    layers = _layers(source, settings)
    model_free_ptq(
        str(source.merged_model),
        str(output),
        scheme=_scheme(settings),
        ignore=layers.left_modules,
        max_workers=1,
        device="cpu",
    )
    return {"type": settings.type, "quantized": len(layers.chosen), "unquantized": layers.left}


def _scheme(settings: CompressedTensors) -> Any:
    """Return compressed-tensors' scheme: FP8_DYNAMIC, W8A16 by rows, or W4A16 by groups."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if settings.type == "fp8":
        return "FP8_DYNAMIC"
    if settings.type == "int8":
        weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    else:
        weights = QuantizationArgs(
            num_bits=4, type="int", symmetric=True, strategy="group", group_size=settings.group_size
        )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def _opened(source: RunResult, settings: CompressedTensors, output: Path) -> Opened:
    return opened.quantized(source, output, "compressed-tensors")


TARGET = ExportTarget(
    "compressed_tensors",
    "the merged model with weights in 8 or 4 bits, in vLLM's format",
    CompressedTensors,
    _check,
    _run,
    _opened,
    of_merged=True,
    for_vllm=True,
)
