"""Phi-3."""

from dataclasses import replace

from zerolora.model.families.keys import Keys
from zerolora.model.families.llama import LAYER, basics, llama_like
from zerolora.model.families.modules import linear, replaced
from zerolora.model.spec import ModelSpec


def _phi3(keys: Keys) -> ModelSpec:
    hidden, layers, heads = basics(keys)
    head_dim = keys.size("head_dim", default=max(hidden // heads, 1))
    key_heads = keys.size("num_key_value_heads", default=heads, null=heads)
    spec = llama_like(keys, key_heads=key_heads, head_dim=head_dim)
    attention = (
        linear(f"{LAYER}.self_attn.o_proj", heads * head_dim, hidden, count=layers),
        linear(f"{LAYER}.self_attn.qkv_proj", hidden, (heads + 2 * key_heads) * head_dim, count=layers),
    )
    mlp = (
        linear(f"{LAYER}.mlp.gate_up_proj", hidden, 2 * spec.inner, count=layers),
        linear(f"{LAYER}.mlp.down_proj", spec.inner, hidden, count=layers),
    )
    return replace(
        spec,
        modules=replaced(replaced(spec.modules, ".self_attn.", attention), ".mlp.", mlp),
        rotary=keys.rotary_share("partial_rotary_factor", 1.0),
        hidden_dropout=keys.rate("resid_pdrop", 0.0),
    )


FAMILIES = {"phi3": _phi3}
