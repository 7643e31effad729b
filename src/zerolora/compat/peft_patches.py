"""peft: the modules that it inserts into a model, and their forward passes."""

import contextlib
import copy
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerolora.compat.bitsandbytes_patches import PACKED
from zerolora.compat.versions import is_replaced, patch, replaced


@patch("peft", features=("peft.tuners.lora:LoraLayer",))
def replace_dropout(model: torch.nn.Module, replacement: Any) -> None:
    """Replace each torch.nn.Dropout by replacement(p), in place. LoraConfig accepts a probability, but no module
    (tuners/lora/layer.py, update_layer)."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout:
                setattr(module, name, replacement(child.p))


@patch(
    "peft",
    upstream="none known; in some families peft reads targets by their last word, as of experts in transformers 4",
    features=("peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",),
)
@contextlib.contextmanager
def targets_as_given() -> Iterator[None]:
    """Let get_peft_model adapt the modules and parameters that a config names, whatever the family, in the block."""
    conversion: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda config, model, conversions: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


@patch("peft", features=("peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",))
def converts(config: Any, model: Any, targets: str | list[str]) -> bool:
    """Return whether peft reads `targets` in an adapter's config for this model as others."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    one = copy.copy(config)
    one.rank_pattern, one.alpha_pattern, one.target_parameters = {}, {}, None
    one.target_modules = targets if isinstance(targets, str) else set(targets)
    before = copy.copy(one.target_modules)
    try:
        convert_peft_config_for_transformers(one, model, None)
    except ValueError:  # of some of the modules that a parameter has taken the place of
        return True
    return bool(one.target_modules != before)


@patch(
    "peft",
    upstream="none known; peft renames tensors of an adapter as transformers renames a checkpoint's weights",
    features=(
        "peft.utils.transformers_weight_conversion:convert_peft_adapter_state_dict_for_transformers",
        "peft.utils.save_and_load:set_peft_model_state_dict",
    ),
)
def not_read_back(base: Any, config: Any, state: dict[str, torch.Tensor]) -> list[str]:
    """Return the tensors of an adapter's file that peft gives to no parameter, or to that of another module, where it
    loads the adapter. `base`, on the meta device, is adapted in place."""
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    with torch.device("meta"):
        reading = get_peft_model(base, copy.copy(config), autocast_adapter_dtype=False)
    read = convert_peft_adapter_state_dict_for_transformers(reading, reading.peft_config["default"], dict(state))
    other = [name for name, tensor in state.items() if read.get(name) is not tensor]
    result: Any = set_peft_model_state_dict(reading, dict(state))
    trained = {name for name, each in reading.named_parameters() if each.requires_grad}
    lacking = [name.replace(".default", "") for name in result.missing_keys if name in trained]
    return list(dict.fromkeys([*other, *lacking]))


@patch("peft", features=("peft.tuners.trainable_tokens:TrainableTokensLayer._collect_token_weights",))
def gather_rows_anywhere() -> None:
    """Let peft read the trained rows of a sharded embedding on any device. It supports only CUDA, and broadcasts from
    rank 0 rows that every rank has gathered (tuners/trainable_tokens/layer.py, _collect_token_weights)."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.integrations import gather_params_ctx

    if is_replaced(TrainableTokensLayer._collect_token_weights):
        return

    def collect(layer: Any, weight: torch.Tensor, rows: list[int], width: int) -> torch.Tensor:
        with gather_params_ctx([weight], modifier_rank=None):  # type: ignore[list-item]  # a parameter
            return weight.detach()[rows].clone()

    TrainableTokensLayer._collect_token_weights = replaced(collect)  # type: ignore[method-assign]


@patch(
    "peft",
    upstream="none known; peft writes the rows into a copy of the whole weight in every forward pass",
    features=("peft.utils.other:TrainableTokensWrapper", "peft.tuners.trainable_tokens:TrainableTokensLayer"),
)
def replace_token_forward(model: Any, of_wrapper: Callable[..., Any], of_embedding: Callable[..., Any]) -> None:
    """Replace the forward methods of the wrappers of an embedding and a head with trained rows, and of the wrapped
    embedding, in place. The buffers of original rows, which only unmerging reads, are dropped: a rank on the meta
    device has no values for them."""
    from peft.utils.other import TrainableTokensWrapper

    for module in model.modules():
        if isinstance(module, TrainableTokensWrapper):
            layer: Any = module.token_adapter
            module.forward = types.MethodType(of_wrapper, module)  # type: ignore[method-assign]
            if isinstance(layer.base_layer, torch.nn.Embedding):
                layer.base_layer.forward = types.MethodType(of_embedding, layer.base_layer)  # type: ignore[method-assign]
            layer.trainable_tokens_original.clear()


@patch(
    "peft",
    upstream="none known; beside another parametrization of a parameter, peft adds the update once more a forward pass",
    features=(
        "peft.tuners.lora.layer:ParamWrapper.get_param",
        "peft.tuners.lora.layer:ParamWrapper.get_delta_factors",
        "peft.tuners.lora.layer:ParamWrapper._activate_lora",
    ),
)
def adapt_packed_parameters(updates: str) -> None:
    """Let peft adapt 4-bit parameters that their module unpacks while it computes: in its forward pass, the two
    factors of a parameter and their scale are under the parameter's name in the module's attribute `updates`."""
    from peft.tuners.lora.layer import ParamWrapper

    kind: Any = ParamWrapper
    if is_replaced(kind.get_param):
        return
    get_param, activate = kind.get_param, kind._activate_lora

    def described(layer: Any) -> torch.Tensor:
        """Return a tensor without numbers of its own: peft reads shape, type and device."""
        state = getattr(layer.get_base_layer(), PACKED, {}).get(layer.parameter_name)
        if state is None:
            parameter: torch.Tensor = get_param(layer)
            return parameter
        return torch.empty((), dtype=state.dtype, device=state.absmax.device).expand(state.shape)

    @contextlib.contextmanager
    def activated(layer: Any, active: list[str]) -> Iterator[None]:
        base, name = layer.get_base_layer(), layer.parameter_name
        if name not in getattr(base, PACKED, {}):
            with activate(layer, active):
                yield
            return
        adapters = [adapter for adapter in active if adapter in layer.lora_A]
        assert len(adapters) < 2, "one adapter is trained"
        if adapters:
            getattr(base, updates)[name] = layer.get_delta_factors(adapters[0])
        try:
            yield
        finally:
            getattr(base, updates).pop(name, None)

    kind.get_param, kind._activate_lora = replaced(described), activated


@patch("peft", features=("peft.utils.other:TrainableTokensWrapper",))
def without_rows(head: Any) -> Any:
    """Return the module that peft wraps in a head with trained rows, any other head unchanged."""
    return head.token_adapter.base_layer if hasattr(head, "token_adapter") else head
