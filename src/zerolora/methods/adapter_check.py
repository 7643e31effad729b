"""The check of an adapter against its config and its base: it has exactly the tensors that adapter_config.json implies
for the base, each once, with peft's name, the right shape and finite numbers.

It runs before an adapter is merged, evaluated, exported, pushed or trained further. The implied tensors are computed
from a ModelSpec of listed modules; otherwise peft builds the adapter on the meta device.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.float_bits import EXPONENTS, integers, is_finite
from zerolora.log import LOGGER
from zerolora.methods.adapter_config import (
    WITHOUT_MEANING,
    check_config,
    check_expressions,
    is_saved,
    is_target,
    rank_and_alpha,
)
from zerolora.methods.method import SHARED
from zerolora.methods.peft_format import ADAPTER, CONFIG, FACTORS, PREFIX, table_paths
from zerolora.model import foreign
from zerolora.model.spec import ModelSpec, Module
from zerolora.tensor_file import StoredTensor

Shapes = dict[str, tuple[int, ...]]

READ = 2**24
"""Bytes that are read at a time."""
MAGNITUDE = ".lora_magnitude_vector"
BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class ImpliedTensors:
    """The tensors that a config implies for a base, by name."""

    needed: Shapes
    allowed: Shapes
    """Copies of embedding and head, which peft saves beside an adapter of them, or of a resized vocabulary
    (peft/utils/save_and_load.py, save_embedding_layers)."""
    base: frozenset[str]
    """Names of the base's parameters."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Prefixes that all tensor names of embedding and head have."""
        return tuple({f"{name.rpartition('.')[0].removesuffix('.base_layer')}." for name in self.allowed})


@dataclass(frozen=True)
class ImpliedShapes:
    """The tensors of a method's adapters, by the modules of a spec."""

    of_module: Callable[[Mapping[str, Any], ModelSpec, Module, str], Iterator[tuple[str, tuple[int, ...]]]]
    """Yields name, after the module's path, and shape of each tensor of an adapted module."""
    of_all: Callable[[Mapping[str, Any], Sequence[Module]], Shapes] = lambda config, adapted: {}
    """Returns the tensors that all adapted modules share."""


def check_adapter(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    model: Any,
    shapes: ImpliedShapes,
) -> None:
    """Raise UserError unless an adapter directory's tensors are those that its config implies for `model`, the base on
    the meta device or its spec."""
    check_config(config, directory / CONFIG)
    check_expressions(config, _paths(model), directory / CONFIG)
    path = directory / ADAPTER
    if not tensors:
        raise UserError(
            f"{path}: contains no tensors; they were saved before they were gathered from the ranks (ZeRO-3, FSDP): "
            "save the adapter again"
        )
    check_whole(path, tensors)
    if isinstance(model, ModelSpec):
        implied = _listed(config, model, shapes)
    else:
        implied = _built(config, model, directory / CONFIG)
    # peft's reader also accepts another name of magnitudes than its save_pretrained writes.
    names = {name: name.removesuffix(".weight") if name.endswith(f"{MAGNITUDE}.weight") else name for name in tensors}
    _compare(path, {names[name]: each for name, each in tensors.items()}, implied, config)
    check_finite(path, tensors)
    if _is_untrained(tensors, config):
        LOGGER.warning("%s: adds zero everywhere, so it was not trained: the model with it equals the base", path)


def _is_untrained(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> bool:
    """Return whether an adapter has only factors, and all their products are zero."""
    products: dict[str, list[StoredTensor]] = {}
    for name, each in tensors.items():
        module, mark, part = name.partition(".lora_")
        if not mark or part.removesuffix(".weight") not in ("A", "B", "embedding_A", "embedding_B"):
            return False
        products.setdefault(module, []).append(each)
    alpha = any(rank_and_alpha(config, module.removeprefix(PREFIX))[1] for module in products)
    zero = (  # of either sign
        any(not any((integers(part, each.kind) << 1).any() for part in _parts(each)) for each in reversed(pair))
        for pair in products.values()
    )
    return not alpha or all(zero)


def _paths(model: Any) -> list[str]:
    """Return all module paths of a model or a spec."""
    if isinstance(model, ModelSpec):
        return [module.path.format(number) for module in model.modules for number in module.numbers]
    return [name for name, _ in model.named_modules()]


def check_whole(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise UserError if a tensor of the file `path` is empty, or not of a trained tensor's type."""
    for name, each in tensors.items():
        if not math.prod(each.shape):
            raise UserError(
                f"{path}: {name} is empty, of shape {list(each.shape)}; it was saved before it was gathered from the "
                "ranks (ZeRO-3, FSDP): save the adapter again"
            )
        if each.kind not in EXPONENTS:
            raise UserError(
                f"{path}: {name} is stored as {each.kind}, and a trained tensor is {', '.join(EXPONENTS)}; save the "
                "adapter again in one of these"
            )


def check_finite(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise UserError if the file `path` has numbers that are not finite."""
    for name, each in tensors.items():
        if not all(is_finite(part, each.kind) for part in _parts(each)):
            raise UserError(
                f"{path}: {name} contains numbers that are not finite, so the training that wrote it diverged; use an "
                "earlier checkpoint of it, or train again with a lower learning rate"
            )


def _parts(tensor: StoredTensor) -> Iterator[bytes]:
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        for start in range(tensor.start, tensor.stop, READ):
            yield file.read(min(READ, tensor.stop - start))


def _compare(
    path: Path, tensors: Mapping[str, StoredTensor], implied: ImpliedTensors, config: Mapping[str, Any]
) -> None:
    known = implied.allowed | implied.needed
    for name in tensors:
        if name not in known and _unwrapped(name) in known:
            raise UserError(
                f"{path}: {name} has the name of a wrapped module, which peft would ignore; save the adapter from the "
                f"unwrapped model, or rename it to {_unwrapped(name)}{_more([*tensors])}"
            )
        if name not in known and (module := _absent(name, implied.base)):
            raise UserError(f"{path}: {name} is of {module}, which the base lacks: {_lacking(module, implied.base)}")
    for name, each in tensors.items():
        if name in known and each.shape != known[name]:
            raise UserError(f"{path}: {_shape_fault(name, each.shape, implied, config)}")
    missing = [name for name in implied.needed if name not in tensors]
    if missing:
        raise UserError(
            f"{path}: {missing[0]} is missing{_more(missing)}, which {CONFIG} implies for this base; save the adapter "
            "again with save_pretrained"
        )
    surplus = [name for name in tensors if name not in known]
    if surplus:
        raise UserError(
            f"{path}: {surplus[0]} is none of the tensors that {CONFIG} implies for this base{_more(surplus)}; save "
            "the adapter again with save_pretrained, which names its tensors and its config alike"
        )


def _unwrapped(name: str) -> str:
    """Return a tensor's name without what FSDP, DDP, checkpointing and torch.compile add to the path of a module."""
    return ".".join(part for part in name.split(".") if part != "module" and not part.startswith("_"))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _absent(name: str, base: frozenset[str]) -> str | None:
    """Return the module of an adapter's tensor if the base has no parameter in it."""
    module = name.removeprefix(PREFIX)
    for mark in (*FACTORS, BASE_LAYER):
        module = f"{module}.".partition(mark)[0].rstrip(".")
    module = module.replace(".base_layer", "")
    if any(each == module or each.startswith(f"{module}.") for each in base):
        return None
    return module


def _lacking(module: str, base: frozenset[str]) -> str:
    """Return the difference of a base that lacks a module, and the remedy."""
    parts = module.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    layers = {
        int(own[at])
        for own in (name.split(".") for name in base)
        if own[:at] == parts[:at] and at < len(own) and own[at].isdigit()
    }
    if at < len(parts) and layers and int(parts[at]) > max(layers):
        said = f"it has {max(layers) + 1} layers in {'.'.join(parts[:at])}, and the adapter is of more"
    elif _is_renamed(parts[:at], parts[at:], base):
        own = ".".join(parts[at + 1 :])
        return (
            f"it has {own} under another name, as in transformers 4 or in another class of the same architecture; load "
            "the adapter with today's peft and save it again if it works as before, or use the base that it was "
            "trained on"
        )
    else:
        said = "its modules have other names, as of another architecture or another class of the same"
    return f"{said}; use the base that the adapter was trained on"


def _is_renamed(before: list[str], after: list[str], base: frozenset[str]) -> bool:
    """Return whether a base has a layer's module `after` under another path than `before`, or a layer's experts in one
    parameter instead of a module each."""
    if not after:
        return False
    layer = ".".join([*before[-1:], *after])
    if re.search(r"\.experts\.\d+\.", layer):
        return any(".experts." in name for name in base)
    return any(f".{layer}." in f".{name}" for name in base)


def _shape_fault(name: str, shape: tuple[int, ...], implied: ImpliedTensors, config: Mapping[str, Any]) -> str:
    """Return the error about a tensor's shape, and the remedy."""
    expected = (implied.allowed | implied.needed)[name]
    said = f"{name} is {list(shape)}, and should be {list(expected)}"
    if len(shape) != len(expected):
        return f"{said}; save the adapter again with save_pretrained"
    differing = [index for index, (one, other) in enumerate(zip(shape, expected, strict=True)) if one != other]
    rank = 0 if ".lora_A" in name or ".lora_embedding_A" in name else 1
    if ".lora_" in name and len(shape) == 2 and rank in differing:
        r, _ = rank_and_alpha(config, name.removeprefix(PREFIX).partition(".lora_")[0])
        default = "" if "r" in config else ", the default where r is missing"
        return f"{said}: {CONFIG} has r: {r} for it{default}; bring the config that belongs to these tensors"
    if len(differing) == 1 and shape[differing[0]] > expected[differing[0]] and name.startswith(implied.tables):
        return (
            f"{said}: the vocabulary has {shape[differing[0]]} rows in the adapter and {expected[differing[0]]} in the "
            "base, so tokens were added before it was trained; resize the base with resize_token_embeddings, save it "
            "with the adapter's tokenizer, and take that as the base"
        )
    if differing == [0] and name.startswith(implied.tables):
        return (
            f"{said}: the vocabulary has {shape[0]} rows in the adapter and {expected[0]} in the base, which was "
            "lengthened after the adapter was trained, or is another one; take the base as it was then"
        )
    sizes = " and ".join(f"{shape[index]} instead of {expected[index]}" for index in differing)
    return f"{said} in this base: its module has other sizes ({sizes}); use the base that the adapter was trained on"


def _listed(config: Mapping[str, Any], model: ModelSpec, shapes: ImpliedShapes) -> ImpliedTensors:
    """Return the tensors that peft would save for the modules of a spec."""
    needed: Shapes = {}
    allowed: Shapes = {}
    base: dict[str, tuple[int, ...]] = {}
    adapted_modules: list[Module] = []
    for module in model.modules:
        for path in (module.path.format(number) for number in module.numbers):
            own = {f"{path}.{name}": shape for name, shape in module.weights}
            base |= own or {f"{path}.weight": (model.vocabulary, model.hidden)}
            adapted = is_target(config, path)
            if adapted:
                adapted_modules.append(module)
                parts = shapes.of_module(config, model, module, path)
                needed |= {f"{PREFIX}{path}.{part}": shape for part, shape in parts}
            if module.kind in SHARED:
                infix = BASE_LAYER if adapted else "."
                weights = module.weights or (("weight", (module.outputs, module.inputs)),)
                allowed |= {f"{PREFIX}{path}{infix}{name}": shape for name, shape in weights}
    needed |= {f"{PREFIX}{name}": shape for name, shape in base.items() if is_saved(config, name)}
    if adapted_modules:
        needed |= shapes.of_all(config, adapted_modules)
    return ImpliedTensors(needed, allowed, frozenset(base))


def _built(config: Mapping[str, Any], model: Any, path: Path) -> ImpliedTensors:
    """Return the tensors of the adapter that peft adds to a copy of a model on the meta device.

    Raises UserError, naming the file `path`, if it cannot.
    """
    import torch

    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model, get_peft_model_state_dict

    kind = PEFT_TYPE_TO_CONFIG_MAPPING[config["peft_type"]]
    # Names and shapes do not depend on the factors' initialization or peft's class of model.
    ignored = WITHOUT_MEANING | {"init_lora_weights"}
    known = {key: value for key, value in config.items() if key in kind.__dataclass_fields__ and key not in ignored}
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
            wrapped = get_peft_model(copy.deepcopy(model), kind(**known), autocast_adapter_dtype=False)
    except Exception as error:  # peft and torch raise errors of many types
        raise UserError(
            f"{path}: peft cannot put this adapter on the base ({type(error).__name__}: {foreign.reason(error)}); "
            "use the base that it was trained on"
        ) from None
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    needed = {name: tuple(tensor.shape) for name, tensor in state.items()}
    base = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    allowed: Shapes = {}
    for table in table_paths(model):
        whole = f"{PREFIX}{table}."
        adapted = any(name.startswith(f"{whole}lora_") for name in needed)
        own = {name.removeprefix(f"{table}."): shape for name, shape in base.items() if name.startswith(f"{table}.")}
        infix = BASE_LAYER if adapted else "."
        allowed |= {f"{PREFIX}{table}{infix}{name}": shape for name, shape in own.items()}
    return ImpliedTensors(needed, allowed, frozenset(base))
