"""Experts whose stacked weights are in 4 bits: each layer's are unpacked while it computes, and an adapter's added.

bitsandbytes quantizes linear modules alone. The parameter of the experts' module has the codes, so that an engine
shards, gathers and frees them as those of a linear module. In the forward pass, and only there, the class reads
the unpacked weights instead: each is made where it is first read, so that its gradient lives as briefly as peft's, and
exists until the end of the pass, or until the backward pass unless activations are checkpointed.
"""

import functools
from typing import Any

import torch

from zerolora.compat.bitsandbytes_patches import PACKED, packed_parameters, unpacked
from zerolora.compat.peft_patches import adapt_packed_parameters

UPDATES = "updates"
"""Attribute of such a module: the factors of an adapter, and their scale, by parameter."""
WEIGHTS = "unpacked_weights"
"""Attribute in its forward pass: the weights that have been read."""


def unpack_while_computing(model: Any) -> None:
    """Make modules with 4-bit parameters that their class does not know unpack them in their forward pass, in place."""
    for module in model.modules():
        if own := packed_parameters(module):
            setattr(module, PACKED, {name: parameter.quant_state for name, parameter in own.items()})
            setattr(module, UPDATES, {})
            kind: Any = type(module)
            module.__class__ = _unpacking(kind, tuple(own))
            # Hooks, since accelerate replaces the forward method of a model on several GPUs.
            module.register_forward_pre_hook(_begin)
            module.register_forward_hook(_end, always_call=True)
            adapt_packed_parameters(UPDATES)


@functools.cache
def _unpacking(kind: Any, names: tuple[str, ...]) -> Any:
    """Return a subclass whose attributes of these names are unpacked weights in its forward pass."""
    own: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    return type(f"Unpacking{kind.__name__}", (kind,), own)


def _begin(module: Any, _: Any) -> None:
    vars(module)[WEIGHTS] = {}


def _end(module: Any, *_: Any) -> None:
    vars(module).pop(WEIGHTS, None)


def _read(module: Any, name: str) -> torch.Tensor:
    """Return the unpacked weight in the module's forward pass, its parameter at other times."""
    weights: dict[str, torch.Tensor] | None = vars(module).get(WEIGHTS)
    if weights is None:
        parameter: torch.Tensor = module._parameters[name]
        return parameter
    if name not in weights:
        state, update = getattr(module, PACKED)[name], getattr(module, UPDATES).get(name)
        weights[name] = _weight(module._parameters[name], state, update)
    return weights[name]


def _weight(parameter: Any, state: Any, update: Any) -> torch.Tensor:
    weight: torch.Tensor = unpacked(parameter, state)
    if update is None:
        return weight
    left, right, scale = update
    # As peft adds it to a weight that is not quantized (tuners/lora/layer.py, _LoraFactorsProxy).
    with torch.autocast(weight.device.type, enabled=False):
        return weight.baddbmm_(left, right, alpha=scale)
