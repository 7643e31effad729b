"""Mistral, and Mixtral with its experts."""

from dataclasses import replace

from zerolora.model.families.keys import Keys
from zerolora.model.families.llama import LAYER, basics, llama_like
from zerolora.model.families.modules import replaced, weight_shapes
from zerolora.model.spec import ModelSpec, Module


def _mistral(keys: Keys) -> ModelSpec:
    hidden, _, heads = basics(keys)
    head_dim = max(hidden // heads, 1)
    return llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=8),
        head_dim=keys.size("head_dim", default=head_dim, null=head_dim),
    )


def _mixtral(keys: Keys) -> ModelSpec:
    """Like Mistral, with all experts of a layer in two three-dimensional parameters, and a router class of its own.

    Neither is an nn.Linear, but peft's all-linear adapts both: methods/lora.py, _expert_parameters.
    """
    spec = _mistral(keys)
    hidden, inner, layers = spec.hidden, spec.inner, spec.layers
    experts = keys.size("num_experts", "num_local_experts", default=8)
    both = (("gate_up_proj", (experts, 2 * inner, hidden)), ("down_proj", (experts, hidden, inner)))
    mixture = (
        Module(f"{LAYER}.mlp.gate", "router", weight_shapes((experts, hidden)), layers),
        Module(f"{LAYER}.mlp.experts", "experts", both, layers),
    )
    return replace(
        spec,
        modules=replaced(spec.modules, ".mlp.", mixture),
        experts=experts,
        experts_per_token=keys.size("num_experts_per_tok", default=2),
    )


FAMILIES = {"mistral": _mistral, "mixtral": _mixtral}
