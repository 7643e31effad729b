"""peft's models and adapter files, and settings that match no module."""

import copy
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.compat.transformers_patches import computes_otherwise, former_names
from zerolora.errors import UserError, shown
from zerolora.methods import experts
from zerolora.methods.adapter_config import is_saved
from zerolora.methods.method import check_untied, is_named
from zerolora.methods.without_gradient import expressions
from zerolora.model import foreign
from zerolora.model.architecture import left_out, other_parts, own_shapes, role
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

    # peft warns of a missing cast on the meta device, and, before it adapts parameters, of patterns that are for them.
    logging.getLogger("peft").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # which peft reads
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
        for mark in (".modules_to_save.", ".original_module."):
            own = name.replace(mark, ".")
            if own == name or own not in tensors:
                continue
            if mark == ".modules_to_save." and not each.read().equal(tensors[own].read()):
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


def read_alike(model: Any) -> Any:
    """Return the config of peft's model such that peft adapts the same modules where it reads it.

    In some families peft reads the names of an expert's modules as those of the experts' parameters, whatever modules
    have the name too (transformers_weight_conversion.py, _convert_peft_config_moe). Those of shared experts and dense
    layers are then given as parameters: a linear module's factors have the same names and the same product.
    """
    from zerolora.compat.peft_patches import converts

    config, base = copy.copy(model.peft_config["default"]), model.get_base_model()
    targets = config.target_modules
    if not targets or not converts(config, base, targets if isinstance(targets, str) else list(targets)):
        return config
    adapted = [path for path, parameter in _adapted(model) if not parameter]
    names = adapted if isinstance(targets, str) else sorted(targets)
    taken = [name for name in names if converts(config, base, [name])]
    config.target_modules = {name for name in names if name not in taken}
    config.target_parameters = [
        *(config.target_parameters or ()),
        *(f"{path}.weight" for path in adapted if is_named(path, taken)),
    ]
    return config


@dataclass(frozen=True)
class PeftTargets:
    """Targets as peft has them."""

    modules: str | list[str]
    parameters: list[str]
    paths: list[str]
    """Of the parameters."""
    joined: dict[str, int]
    """Factors of r and alpha of parameters that hold more than one projection, by regular expressions of their
    paths."""

    def factors(self, rank_pattern: Iterable[str]) -> dict[str, int]:
        """Return `joined` without parameters that have a rank of their own."""
        return {
            expression: factor
            for expression, factor in self.joined.items()
            if not any(
                re.fullmatch(rf"(.*\.)?({key})", path)
                for path in self.paths
                if re.fullmatch(expression, path)
                for key in rank_pattern
            )
        }


def peft_targets(model: Any, targets: str | list[str]) -> PeftTargets:
    """Return the modules and the parameters that targets mean (methods/experts.py)."""

    def matches(path: str) -> bool:
        if isinstance(targets, str):
            return re.fullmatch(targets, path) is not None
        return is_named(path, targets)

    paths: list[str] = []
    nameable: list[str] = []
    joined: dict[str, int] = {}
    former = former_names(model.config.get_text_config().model_type)
    leaves = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    for path, module in model.named_modules():
        kind = role(module)
        shapes = own_shapes(module) if kind in ("experts", "router") else {}
        if shapes:
            nameable += [path, *(f"{path}.{name}" for name in (*shapes, *dict(former)))]
        for name, shape in shapes.items():
            if targets == "all-linear":
                own = False if kind == "experts" and len(shape) == 3 else None
            else:
                own = experts.named([path], name, kind, len(shape), former, matches)
            if own is not None:
                paths.append(f"{path}.{name}")
            if own is False and (count := experts.projections(shapes, name)) > 1:
                owner = rf"{re.escape(path.rpartition('.')[2])}\." if name in leaves else ""
                joined[rf".*\.{owner}{re.escape(name)}"] = count
    names = sorted({".".join(path.split(".")[-2:]) for path in paths})
    alone = [path for path, _ in model.named_parameters() if is_named(path, names)] == paths
    parameters = names if alone else paths
    if targets == "all-linear":
        return PeftTargets(all_linear(model), parameters, paths, joined)
    if isinstance(targets, str):
        return PeftTargets(targets if any(map(matches, _module_paths(model))) else [], parameters, paths, joined)
    # A name of nothing stays, for check_names to refuse.
    of_parameters = {name for name in targets if any(is_named(path, (name,)) for path in nameable)}
    of_modules = {name for name in targets if any(is_named(path, (name,)) for path in _module_paths(model))}
    names = [name for name in targets if name in of_modules or name not in of_parameters]
    return PeftTargets(names, parameters, paths, joined)


def all_linear(model: Any) -> list[str]:
    """Return the names of the linear modules that all-linear adapts, or their paths if other modules have such a name
    too."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    head, unfit, never = model.get_output_embeddings(), set(left_out(model)), excluded(model)
    every = [path for path in _module_paths(model) if never is None or not re.fullmatch(never, path)]
    chosen = [
        path
        for path in every
        if isinstance(module := model.get_submodule(path), Linear | Conv1D) and module is not head and path not in unfit
    ]
    names = sorted({path.rpartition(".")[2] for path in chosen})
    return names if [path for path in every if is_named(path, names)] == chosen else chosen


def _module_paths(model: Any) -> list[str]:
    return [path for path, module in model.named_modules() if path and role(module) != "router"]


def outside(model: Any) -> str | None:
    """Return a regular expression of all modules beside the language model, for peft's exclude_modules; None if there
    are none."""
    parts = other_parts(model)
    return "|".join(rf"{re.escape(part)}(\..*)?" for part in parts) or None


def excluded(model: Any) -> str | None:
    """Return a regular expression of all modules that are never adapted: those beside the language model and subclasses
    of nn.Linear that compute something else, as some routers do; None if there are none."""
    paths = linear_paths(model)
    others = [path for path in paths if computes_otherwise(model.get_submodule(path))]
    return "|".join(filter(None, (outside(model), *expressions(others, paths)))) or None


def linear_paths(model: Any) -> list[str]:
    """Return the paths of the linear modules."""
    import torch

    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def table_paths(model: Any) -> list[str]:
    """Return the paths of a transformers model's embedding and head."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is each for each in tables)]


def saved_name(name: str) -> str:
    """Return the base model's name of a whole weight in an adapter."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def adapted_module(name: str) -> str:
    """Return the path of the module that a tensor of an adapter belongs to, or the name of a weight trained whole."""
    for mark in FACTORS:
        name = name.partition(mark)[0]
    return name


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
    tied = {*base.all_tied_weights_keys, *base.all_tied_weights_keys.values()}
    for path in table_paths(base):
        shared = f"{path}.weight" in tied
        if path in adapted:
            check_untied(shared, f"{section}.targets", [path])
        if ends and path.endswith(ends):
            check_untied(shared, f"{section}.modules_to_save", [path])


def _adapted(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the base model's path of each module that peft has adapted, and the name of the parameter if it is that."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, each in model.get_base_model().named_modules():
        if isinstance(each, BaseTunerLayer) and not path.endswith(".token_adapter"):  # for trained rows
            yield path.replace(".base_layer", ""), getattr(each, "parameter_name", "")


def adapted_paths(model: Any) -> list[str]:
    """Return the base model's paths of the modules and parameters that peft has adapted."""
    return [f"{path}.{parameter}" if parameter else path for path, parameter in _adapted(model)]


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
