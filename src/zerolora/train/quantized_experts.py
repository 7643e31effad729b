"""Experts whose stacked weights are in 4 bits: each layer's are unpacked while it computes, and an adapter's added.

bitsandbytes quantizes linear modules alone. The parameter of the experts' module has the codes, so that an engine
shards, gathers and frees them as those of a linear module; the class computes with the unpacked weights, which exist in
its forward pass, and until the backward pass unless activations are checkpointed.
"""

import functools
from typing import Any

import torch

from zerolora.compat.bitsandbytes_patches import PACKED, packed_parameters, unpacked
from zerolora.compat.peft_patches import adapt_packed_parameters

UPDATES = "updates"
"""Attribute of such a module: the factors of an adapter, and their scale, by parameter."""


def unpack_while_computing(model: Any) -> None:
    """Make modules with 4-bit parameters that their class does not know unpack them in their forward pass, in place."""
    for module in model.modules():
        if own := packed_parameters(module):
            setattr(module, PACKED, {name: parameter.quant_state for name, parameter in own.items()})
            setattr(module, UPDATES, {})
            module.__class__ = _unpacking(type(module))
            adapt_packed_parameters(UPDATES)


@functools.cache
def _unpacking(kind: Any) -> Any:
    """Return a subclass that computes with unpacked weights."""

    def forward(module: Any, *arguments: Any, **named: Any) -> Any:
        states = getattr(module, PACKED)
        for name, state in states.items():
            # An attribute of the object hides the parameter.
            vars(module)[name] = _weight(module._parameters[name], state, getattr(module, UPDATES).get(name))
        try:
            return kind.forward(module, *arguments, **named)
        finally:
            for name in states:
                del vars(module)[name]

    return type(f"Unpacking{kind.__name__}", (kind,), {"forward": forward})


def _weight(parameter: Any, state: Any, update: Any) -> torch.Tensor:
    weight: torch.Tensor = unpacked(parameter, state)
    if update is None:
        return weight
    left, right, scale = update
    # As peft adds it to a weight that is not quantized (tuners/lora/layer.py, _LoraFactorsProxy).
    with torch.autocast(weight.device.type, enabled=False):
        return weight.baddbmm_(left, right, alpha=scale)
