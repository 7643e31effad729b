"""Loads a model with its weights: every reader of weights that computes with them calls this.

Weights that are dequantized as they are loaded are given to transformers as it reads those of a file: one at a time,
each where it is first needed.
"""

import contextlib
from pathlib import Path
from typing import Any

from zerolora.model import foreign
from zerolora.model.architecture import auto_class, built_on_meta, config_of
from zerolora.model.dequantized import DequantizedTensor, is_dequantized_on_load, weight_headers


def load_model(directory: Path, config: Any = None, **options: Any) -> Any:
    """Return the model in a directory as its class's from_pretrained returns it with `options`.

    `config`: its config, if it is to be another than that of its config.json.
    """
    given = {} if config is None else {"config": config}
    config = config or config_of(directory)
    if not is_dequantized_on_load(directory):
        own = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
        return auto_class(config).from_pretrained(directory, **own, **given, **options)
    from safetensors import safe_open

    dtype = options.pop("dtype")
    if dtype == "auto":
        dtype = config.dtype or "bfloat16"
    built = built_on_meta(config)  # by the auto class, which takes no weights without a directory
    device = next(iter(places)) if len(places := {*_placed(options)}) == 1 else None
    with contextlib.ExitStack() as stack:
        state: dict[str, Any] = {}
        for file in weight_headers(directory):
            mapped = stack.enter_context(safe_open(file.path, framework="pt"))
            for name, each in file.tensors.items():
                state[name] = _Slice(each, device) if isinstance(each, DequantizedTensor) else mapped.get_slice(name)
        generation = _generation_config(directory)
        model = type(built).from_pretrained(
            None, config=built.config, state_dict=state, dtype=dtype, generation_config=generation, **options
        )
    model.config.name_or_path = model.name_or_path = str(directory)
    return model


class _Slice:
    """A quantized weight, which transformers reads by indexing, as a slice of a safetensors file."""

    def __init__(self, tensor: DequantizedTensor, device: Any) -> None:
        self.tensor, self.device = tensor, device

    def __getitem__(self, _: Any) -> Any:
        """Return all of it, in bf16."""
        (whole,) = self.tensor.in_turn([(0, self.tensor.shape[0])], self.device)
        return whole


def _placed(options: dict[str, Any]) -> list[Any]:
    """Return the devices of a device_map that names some."""
    places = options.get("device_map")
    return [*places.values()] if isinstance(places, dict) else []


def _generation_config(directory: Path) -> Any:
    from transformers import GenerationConfig

    name = foreign.GENERATION if (directory / foreign.GENERATION).is_file() else foreign.CONFIG
    return GenerationConfig.from_pretrained(directory, config_file_name=name, local_files_only=True)
