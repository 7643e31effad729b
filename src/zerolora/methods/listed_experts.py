"""Adapters of experts that transformers 4 listed, such as `experts.3.w1`, for a base whose class stacks them."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.methods.adapter_config import rank_and_alpha
from zerolora.methods.peft_format import ADAPTER, PREFIX
from zerolora.tensor_file import StoredTensor, read_header

if TYPE_CHECKING:
    import torch

FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
CONVERTED = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")
"""Keys of an adapter's config that peft converts."""


def stacked(
    tensors: Mapping[str, StoredTensor], config: dict[str, Any], model: Any
) -> tuple[Mapping[str, StoredTensor], dict[str, Any]]:
    """Return an adapter as peft reads it into this class, if it is for modules that the class does not have.

    peft joins the factors of all experts of a layer, and those of gate and up in blocks, so that the products stay
    (peft/utils/transformers_weight_conversion.py). Raises UserError if it cannot.
    """
    if not hasattr(model, "named_modules"):  # the spec, whose weights have the names of the files
        return tensors, config
    known = {name for name, _ in model.named_modules()}
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors if ".lora_" in name}
    # peft nests the wrappers of a module's parameters in one another.
    unknown = {module for module in modules if module.replace(".base_layer", "") not in known}
    if not unknown:
        return tensors, config
    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    from peft import LoraConfig
    from peft.utils import transformers_weight_conversion as conversion

    settings = LoraConfig(**{key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__})
    try:
        conversion.convert_peft_config_for_transformers(settings, model, None)
        read = {name: tensor.read() for name, tensor in tensors.items()}
        converted = conversion.convert_peft_adapter_state_dict_for_transformers(model, settings, read)
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{ADAPTER}: peft cannot read these experts into {type(model).__name__}: {error}") from None
    joined = {module for module in unknown if not any(name.startswith(f"{PREFIX}{module}.") for name in converted)}
    if not joined:  # an adapter of another model, which the check names
        return tensors, config
    r, alpha = config["r"], config["lora_alpha"]
    if config.get("use_rslora") or {rank_and_alpha(config, module) for module in joined} != {(r, alpha)}:
        # peft would give the joined factors another scale, without a word.
        raise UserError(
            f"{ADAPTER}: {min(joined)} is no module of {type(model).__name__}, and rsLoRA, rank_pattern or "
            "alpha_pattern give it a scale that is lost where peft joins experts; merge it with the versions of "
            "transformers and peft that trained it"
        )
    return _stored(converted), config | {key: _as_json(getattr(settings, key)) for key in CONVERTED}


def _stored(tensors: "Mapping[str, torch.Tensor]") -> "Mapping[str, StoredTensor]":
    """Return tensors in a file that exists as long as this process: an adapter is checked and merged from its file."""
    from safetensors.torch import save_file

    folder = tempfile.TemporaryDirectory(prefix="zerolora-experts-")
    FOLDERS.append(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path := Path(folder.name, ADAPTER))
    return read_header(path).tensors


def _as_json(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value
