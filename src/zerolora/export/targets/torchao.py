"""torchao: the merged model with weights in 8 or 4 bits, for transformers and vLLM."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.config.target_sections import TorchAo
from zerolora.errors import UserError
from zerolora.export import opened
from zerolora.export.linear_layers import Layers, add_to_config, copy_small_files, linear_layers
from zerolora.export.targets.target import ExportTarget, Opened, RunResult
from zerolora.files import write_json
from zerolora.model.weight_files import WEIGHT_INDEX
from zerolora.tensor_file import TYPES, StoredTensor

if TYPE_CHECKING:
    import torch

PACKAGE = "torchao"
NVFP4_MULTIPLE = 16
"""Divisor of both dimensions of a weight (torchao/prototype/mx_formats/inference_workflow.py)."""


def _check(source: RunResult, settings: TorchAo) -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError("export.targets: torchao is not installed; pip install torchao==0.18.0")
    _layers(source, settings)


def _layers(source: RunResult, settings: TorchAo) -> Layers:
    multiple = NVFP4_MULTIPLE if settings.type == "nvfp4" else 1
    return linear_layers(source.merged_model, "export.torchao.type", multiple, multiple)


def _run(source: RunResult, settings: TorchAo, output: Path) -> dict[str, Any]:
    """Quantize tensor by tensor; one quantized file of the merged model is in memory."""
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers import TorchAoConfig

    layers = _layers(source, settings)
    chosen = {each.name for each in layers.chosen}
    config = _config(settings.type)

    @functools.cache
    def described(shape: tuple[int, ...], dtype: "torch.dtype") -> str:
        # Independent of the values, so every file can list all tensors: transformers reads the list of the last file.
        import torch

        flat = flatten_tensor_state_dict({"a.weight": _quantized(torch.zeros(shape, dtype=dtype), config)})
        text: str = flat[1]["a.weight"]
        return text

    tensors = {name: each for file in layers.files for name, each in file.tensors.items()}
    plain = json.dumps({"_type": "Tensor"})
    metadata = {
        name: described(each.shape, _dtype(each)) if name in chosen else plain for name, each in tensors.items()
    }
    metadata |= {"tensor_names": json.dumps(list(tensors)), "format": "pt"}
    copy_small_files(source.merged_model, output)
    index: dict[str, str] = {}
    total = 0
    for file in layers.files:
        parts: dict[str, torch.Tensor] = {}
        for name, stored in file.tensors.items():
            tensor = stored.read()
            flat = {name: _quantized(tensor, config) if name in chosen else tensor}
            values, described_as = flatten_tensor_state_dict(flat)
            assert described_as[name] == metadata[name], f"{name}: {described_as[name]}"
            parts |= values
        save_file(parts, output / file.path.name, metadata=metadata)
        index |= dict.fromkeys(parts, file.path.name)
        total += sum(part.nbytes for part in parts.values())
    if len(layers.files) > 1:
        write_json(output / WEIGHT_INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    add_to_config(output, _jsonable(TorchAoConfig(config, modules_to_not_convert=layers.left_modules).to_dict()))
    return {"type": settings.type, "quantized": len(chosen), "unquantized": layers.left}


def _config(type_: str) -> Any:
    """Return torchao's config of a type, without a compiler setup: nothing is compiled here."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    if type_ == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if type_ == "fp8":
        return Float8WeightOnlyConfig(set_inductor_config=False)
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig()


def _quantized(weight: "torch.Tensor", config: Any) -> "torch.Tensor":
    """Return the weight of a linear layer as torchao quantizes it."""
    import torch
    from torchao.quantization import quantize_

    with torch.device("meta"):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, config)
    return layer.weight.data if type(layer.weight) is torch.nn.Parameter else layer.weight


def _dtype(stored: StoredTensor) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, TYPES[stored.kind][0])
    return dtype


def _jsonable(config: dict[str, Any]) -> Any:
    return json.loads(json.dumps(config, default=lambda value: value.value))


def _opened(source: RunResult, settings: TorchAo, output: Path) -> Opened:
    return opened.quantized(source, output, PACKAGE)


TARGET = ExportTarget(
    "torchao",
    "the merged model with weights in 8 or 4 bits",
    TorchAo,
    _check,
    _run,
    _opened,
    of_merged=True,
    for_vllm=True,
)
