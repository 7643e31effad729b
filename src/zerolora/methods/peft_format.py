"""peft's models and adapter files, and settings that match no module."""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError, shown
from zerolora.methods.adapter_config import is_saved
from zerolora.methods.experts import FAMILIES, ROUTER, check_expression, paths_named
from zerolora.methods.method import check_untied
from zerolora.model import foreign
from zerolora.model.architecture import other_parts
from zerolora.model.spec import ModelSpec
from zerolora.tensor_file import StoredTensor, read_header

if TYPE_CHECKING:
    import torch

ADAPTER = "adapter_model.safetensors"
CONFIG = foreign.ADAPTER_CONFIG
PREFIX = "base_model.model."
"""Prefix of the name of every tensor of an adapter."""
FACTORS = (".lora_", ".ia3_l", ".vera_", ".token_adapter.")
"""Parts of the name of every tensor that is not a copy of a base weight."""


def peft_model(model: Any, config: Any, section: str, targets: str | list[str]) -> Any:
    """Return peft's model around a transformers model, with an initial adapter in the model's type.

    Raises UserError, naming `section`.targets, if peft matches no target.
    """
    from peft import get_peft_model

    # peft warns of a missing cast on the meta device.
    logging.getLogger("peft").setLevel(logging.ERROR)
    try:
        # Stage 3 does not cast the adapter, and scales the loss only if it is fp16; stages 0 to 2 would cast it; DDP
        # and FSDP keep it in fp32, and cast it.
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UserError(
            f"{section}.targets {targets!r} does not fit the model ({str(error).splitlines()[0]:.120}); "
            f"use all-linear or some of {_linear_names(model)}"
        ) from None


def peft_state(model: Any, trained: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Return trained parameters by their names in an adapter file."""
    from peft import get_peft_model_state_dict

    # By default peft adds resized embeddings.
    return dict(get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False))


def read_adapter(directory: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the headers of an adapter directory's tensors by name, and its adapter_config.json.

    Raises UserError if the file of tensors is missing or incomplete, or has two versions of a tensor.
    """
    if not (directory / ADAPTER).is_file():
        raise UserError(
            f"{directory / ADAPTER}: there is no such file; save the adapter with save_pretrained "
            "(pickled weights such as adapter_model.bin are not read)"
        )
    return _once(directory / ADAPTER, read_header(directory / ADAPTER).tensors), foreign.adapter_config(directory)


def _once(path: Path, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Leave out what peft saves beside embedding and head that are trained whole: a copy of each under another name,
    and the base's own (peft/utils/save_and_load.py, save_embedding_layers)."""
    result = dict(tensors)
    for name, each in tensors.items():
        for copy in (".modules_to_save.", ".original_module."):
            own = name.replace(copy, ".")
            if own == name or own not in tensors:
                continue
            if copy == ".modules_to_save." and not each.read().equal(tensors[own].read()):
                raise UserError(
                    f"{path}: {name} and {own} differ, and either may be the trained one; save the adapter again"
                )
            del result[name]
    return result


def portable(config: Any, base: dict[str, Any]) -> dict[str, Any]:
    """Return an adapter's config that is the same on every machine: with sorted sets, the base's recorded name, and no
    version."""
    value = {key: sorted(item) if isinstance(item, set) else item for key, item in config.to_dict().items()}
    value.update(base_model_name_or_path=base["name"], inference_mode=True, revision=base["revision"])
    value.pop("peft_version", None)
    return {key: getattr(item, "value", item) for key, item in value.items()}


def peft_targets(model: Any, targets: str | list[str]) -> tuple[str | list[str], list[str]]:
    """Return the modules and the parameters to adapt.

    A list may name a parameter of a layer's experts, as in experts.gate_up_proj; all-linear includes those that peft
    supports, without the router. A module whose name peft would read as experts', such as shared_experts.up_proj, is
    adapted as a parameter, its weight.
    """
    family = model.config.get_text_config().model_type
    check_expression(family, targets)
    if targets == "all-linear":
        former = FAMILIES.get(family, {})
        experts = [name for name, parameter in former.items() if parameter != ROUTER]
        return (sorted({*_leaf_names(model), *experts}) if experts else targets), []
    if isinstance(targets, str):
        return targets, []
    # Stage 3 may have sharded a parameter, whose shape is then ds_shape.
    shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in model.named_parameters()}
    parameters = [name for name, shape in shapes.items() if len(shape) == 3]
    stacked = [name for name in targets if any(f".{path}".endswith(f".{name}") for path in parameters)]
    weights = paths_named(family, targets, linear_paths(model))
    modules = [name for name in targets if name not in (*stacked, *weights)]
    return modules, stacked + [f"{name}.weight" for name in weights]


def outside(model: Any) -> str | None:
    """Return a regular expression of all modules beside the language model, for peft's exclude_modules; None if there
    are none."""
    parts = other_parts(model)
    return "|".join(rf"{re.escape(part)}(\..*)?" for part in parts) or None


def linear_paths(model: Any) -> list[str]:
    """Return the paths of the linear modules."""
    import torch

    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def _leaf_names(model: Any) -> list[str]:
    """Return the names of the linear modules but the output head."""
    head = model.get_output_embeddings()
    return sorted({path.rpartition(".")[2] for path in linear_paths(model) if model.get_submodule(path) is not head})


def table_paths(model: Any) -> list[str]:
    """Return the paths of a transformers model's embedding and head."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is each for each in tables)]


def saved_name(name: str) -> str:
    """Return the base model's name of a whole weight in an adapter."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def is_copy(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor of an adapter is an untrained copy of a base weight: peft saves embedding and head beside
    their adapters (peft/utils/save_and_load.py, save_embedding_layers)."""
    if any(mark in name for mark in FACTORS):
        return False
    return ".base_layer." in name or not is_saved(config, saved_name(name))


def conv1d_paths(model: Any) -> set[str]:
    """Return the paths of a model's (or its spec's) modules with a weight of [inputs, outputs]: GPT-2's Conv1D.

    fan_in_fan_out of an adapter's config is only about the last module that peft built (peft/tuners/lora/layer.py,
    dispatch_default; peft/tuners/ia3/model.py).
    """
    if isinstance(model, ModelSpec):
        turned = (each for each in model.modules if each.kind == "conv1d")
        return {each.path.format(number) for each in turned for number in each.numbers}
    from transformers.pytorch_utils import Conv1D

    return {name for name, module in model.named_modules() if isinstance(module, Conv1D)}


def check_names(model: Any, section: str, targets: str | list[str], modules_to_save: Iterable[str]) -> None:
    """Raise UserError if a name in `targets` or `modules_to_save` is not a module of the base model."""
    paths = [name for name, _ in model.get_base_model().named_modules()]
    named = [] if isinstance(targets, str) else list(targets)
    unfit = [f"targets: {shown(name)}" for name in named if not any(f".{path}".endswith(f".{name}") for path in paths)]
    # In peft, the end of a name matches too: norm means input_layernorm too.
    unfit += [f"modules_to_save: {shown(name)}" for name in modules_to_save if not any(p.endswith(name) for p in paths)]
    if unfit:
        raise UserError(f"{section}.{unfit[0]} is not in the model; choose from {_linear_names(model)}")
    base, adapted, ends = model.get_base_model(), adapted_paths(model), tuple(modules_to_save)
    tied = bool(base.config.tie_word_embeddings)
    for path in table_paths(base):
        if path in adapted:
            check_untied(tied, f"{section}.targets", [path])
        if ends and path.endswith(ends):
            check_untied(tied, f"{section}.modules_to_save", [path])


def adapted_paths(model: Any) -> list[str]:
    """Return the base model's paths of the modules and parameters that peft has adapted."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = ((name, each) for name, each in model.get_base_model().named_modules() if isinstance(each, BaseTunerLayer))
    return [
        f"{name.replace('.base_layer', '')}.{each.parameter_name}" if hasattr(each, "parameter_name") else name
        for name, each in layers
        if not name.endswith(".token_adapter")  # for trained rows
    ]


def check_pattern(adapted: list[str], key: str, pattern: Iterable[str]) -> None:
    """Raise UserError if a key is an invalid regular expression, or matches no adapted module: peft would ignore it."""
    for expression in pattern:
        try:
            re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(
                f"{key}: {shown(expression)} is not a valid regular expression ({error}); use one, as in q_proj"
            ) from None
        if not any(re.fullmatch(rf"(.*\.)?({expression})", path) for path in adapted):
            raise UserError(
                f"{key}: {shown(expression)} matches no adapted module; give the name, the end of the path or a "
                f"regular expression of one, as in {adapted[0]}"
            )


def _linear_names(model: Any) -> str:
    """Return the names of a model's linear modules, separated by commas."""
    names = {path.removesuffix(".base_layer").rpartition(".")[2] for path in linear_paths(model)}
    return ", ".join(sorted(names - {"default"}))
