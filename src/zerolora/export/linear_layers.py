"""The weights of a merged model to quantize: the language model's linear layers, as in vLLM."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.compat.transformers_patches import stored_names
from zerolora.errors import UserError
from zerolora.model import foreign
from zerolora.model.architecture import built_on_meta, config_of, other_parts
from zerolora.model.dequantized import weight_headers
from zerolora.model.manifest import is_weight, model_files
from zerolora.model.weight_files import WEIGHT_INDEX
from zerolora.tensor_file import StoredTensor, TensorFile

ROUTER = re.compile(r"(^|\.)(gate|router)$")
MATRIX = 2
"""Dimensions of a linear layer's weight; experts stored together have three."""


@dataclass(frozen=True)
class Layers:
    """The weights of a model directory."""

    files: list[TensorFile]
    chosen: list[StoredTensor]
    """Weights to quantize."""
    left: list[str]
    """Names of the other weights of at least two dimensions, with `*` for numbers."""
    heads: list[str]
    """Names of the output head's module. A tied head has no weight in the files."""

    @property
    def left_modules(self) -> list[str]:
        """Full names of the modules whose weights are not quantized."""
        chosen = {each.name for each in self.chosen}
        names = [name for file in self.files for name in file.tensors if name not in chosen]
        return sorted({*self.heads, *(name.rpartition(".")[0] for name in names if name.endswith(".weight"))})


def linear_layers(model: Path, where: str, inputs: int = 1, outputs: int = 1) -> Layers:
    """Return the weights to quantize of the model in a directory: those of linear layers whose numbers of inputs and
    outputs are multiples of `inputs` and `outputs`. No tensor is loaded.

    Output head, embeddings, routers, experts that are not linear modules, and vision towers are not quantized. Raises
    UserError, which begins with the key `where`, if there is nothing to quantize.
    """
    import torch

    built = built_on_meta(config_of(model))
    head, other = built.get_output_embeddings(), tuple(f"{part}." for part in other_parts(built))
    linear = {
        f"{name}.weight"
        for name, module in built.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and not ROUTER.search(name)
        and not name.startswith(other)
    }
    files = weight_headers(model)
    tensors = [tensor for file in files for tensor in file.tensors.values()]
    matrices = [each for each in tensors if each.name in linear]
    chosen = [each for each in matrices if each.shape[0] % outputs == each.shape[1] % inputs == 0]
    if not matrices:
        _check_names(built, tensors, linear, where)
    if not chosen:
        raise UserError(
            f"{where}: {model} has no linear layer whose inputs are a multiple of {inputs} and outputs a multiple of "
            f"{outputs}; choose another type, or export gguf"
        )
    names = {each.name for each in chosen}
    left = {re.sub(r"\d+", "*", each.name) for each in tensors if len(each.shape) >= MATRIX and each.name not in names}
    heads = [name for name, module in built.named_modules() if module is head]
    return Layers(files, chosen, sorted(left), heads)


def _check_names(built: Any, tensors: list[StoredTensor], linear: set[str], where: str) -> None:
    """Raise UserError, which begins with the key `where`, if linear layers are stored under older names.

    Most vision-language models are; transformers cannot read such names in a quantized checkpoint.
    """
    names = stored_names(built)
    for each in tensors:
        weight, converted = names.of_model(each.name)
        if not converted and weight in linear:
            raise UserError(
                f"{where}: {each.path} stores {weight} as {each.name}, and transformers reads such older names only in "
                "unquantized weights; export gguf, or use the merged model"
            )


def copy_small_files(model: Path, output: Path) -> None:
    """Copy all files of a model directory except for the weights and their index."""
    for path in model_files(model):
        if not is_weight(path.name) and path.name != WEIGHT_INDEX:
            shutil.copyfile(path, output / path.name)


def add_to_config(directory: Path, quantization: object) -> None:
    """Add the quantization config to the config.json of a directory."""
    path = directory / "config.json"
    config = foreign.config_file(path) | {"quantization_config": quantization}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
