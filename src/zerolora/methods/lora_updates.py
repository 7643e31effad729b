"""The updates of a base's weights by an adapter in peft's format: LoRA, rsLoRA or DoRA."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.methods.adapter_config import is_saved, rank_and_alpha
from zerolora.methods.method import Update, tied_weights
from zerolora.methods.peft_format import ADAPTER, PREFIX, conv1d_paths, peft_model, saved_name
from zerolora.methods.token_rows import SUFFIX, row_update
from zerolora.methods.updates import ExpertProducts, Product, Replacement, Shift, Then

if TYPE_CHECKING:
    from zerolora.tensor_file import Factor

PARTS = ("A", "B", "embedding_A", "embedding_B", "magnitude_vector")


def updates_of(tensors: "Mapping[str, Factor]", config: dict[str, Any], model: Any) -> dict[str, Update]:
    """Return the update of each weight of an adapter in peft's format: LoRA, rsLoRA, DoRA.

    `model` is the base on the meta device, or its spec. Raises UserError if a tensor is none of theirs, or has no
    weight of the base that it could be added to.
    """
    result: dict[str, Update] = {}
    modules: dict[str, dict[str, Factor]] = {}
    copies: dict[str, Factor] = {}
    for name, tensor in tensors.items():
        module, _, rest = name.removeprefix(PREFIX).partition(".lora_")
        part = rest.removesuffix(".weight")
        if part in PARTS:
            modules.setdefault(module, {})[part] = tensor
        elif name.endswith(SUFFIX):
            result |= row_update(name, tensor, config, model, tensors)
        elif not rest and (saved_name(name) == name.removeprefix(PREFIX) and is_saved(config, saved_name(name))):
            result[saved_name(name)] = Replacement(saved_name(name), tensor)
        elif not rest:
            copies[saved_name(name)] = tensor
        elif rest == "B.bias":
            result[f"{module}.bias"] = Shift(f"{module}.bias", tensor, _scale(config, module))
        else:
            raise UserError(f"{ADAPTER}: {name} is not a LoRA factor; merge it with peft's merge_and_unload")
    experts = _expert_parameters_of(model, config) if config.get("target_parameters") else {}
    transposed_paths = conv1d_paths(model)
    for module, parts in modules.items():
        if module in experts:
            weight, shape, transposed, scale = experts[module]
            result[weight] = ExpertProducts(weight, parts["A"], parts["B"], scale, shape, transposed)
            continue
        update = Product(f"{module}.weight", parts, _scale(config, module), module in transposed_paths)
        result[update.weight] = update
    return _upon_copies(result, copies, tied_weights(model))


def _scale(config: dict[str, Any], module: str) -> float:
    """Return the factor of a module's product."""
    r, alpha = rank_and_alpha(config, module)
    # rsLoRA scales by alpha / sqrt(r) (arXiv 2312.03732), LoRA by alpha / r.
    return alpha / (r**0.5 if config.get("use_rslora") else r)


def _upon_copies(
    updates: dict[str, Update], copies: "Mapping[str, Factor]", tied: Mapping[str, str]
) -> dict[str, Update]:
    """Return updates that start from `copies` of the base's weights in the adapter's file.

    peft loads such a copy into the base; the copy of a shared weight into both modules.
    """
    result, starts = dict(updates), dict(copies)
    for copy, name in tied.items():
        shared = starts.get(copy, starts.get(name))  # peft loads the head last
        if shared is not None:
            starts |= {copy: shared, name: shared}
    for weight, tensor in starts.items():
        update = result.get(weight)
        # An otherwise unchanged shared weight is a second name of the first, which few checkpoints have.
        start = Replacement(weight, tensor, optional=weight in tied and not {weight, tied[weight]} & updates.keys())
        if update is None:
            result[weight] = start
        elif not isinstance(update, Replacement):
            result[weight] = Then((start, update))
    return result


def _expert_parameters_of(model: Any, config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bool, float]]:
    """Return (parameter, its shape, whether an expert's weight is [inputs, outputs], scale) by the path of the adapter,
    from peft, which nests the wrappers of a module's parameters."""
    import copy

    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper

    known = {key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__}
    wrapped = peft_model(copy.deepcopy(model), LoraConfig(**known), "the adapter", config["target_parameters"])
    return {
        path: (
            f"{path.replace('.base_layer', '')}.{module.parameter_name}",
            tuple(module.get_param().shape),  # type: ignore[no-untyped-call]  # peft's
            not module._did_swap_in_out_features and module.num_experts > 1,  # of one, A is [r, inputs] either way
            module.scaling["default"],
        )
        for path, module in wrapped.get_base_model().named_modules()
        if isinstance(module, ParamWrapper)
    }
