"""Qwen2 and Qwen3."""

from zerolora.model.families.keys import Keys
from zerolora.model.families.llama import basics, llama_like
from zerolora.model.spec import ModelSpec


def _qwen2(keys: Keys) -> ModelSpec:
    hidden, _, heads = basics(keys)
    return llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=32, null=heads),
        head_dim=keys.size("head_dim", default=max(hidden // heads, 1)),
        qkv_bias=True,
    )


def _qwen3(keys: Keys) -> ModelSpec:
    _, _, heads = basics(keys)
    bias = keys.flag("attention_bias", False)
    return llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=32, null=heads),
        head_dim=keys.size("head_dim", default=128),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


FAMILIES = {"qwen2": _qwen2, "qwen3": _qwen3}
