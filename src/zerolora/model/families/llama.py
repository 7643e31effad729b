"""Llama, and the layout that most decoders have adopted from it."""

from zerolora.model.families.keys import Keys
from zerolora.model.families.modules import embedding, head, linear, rms
from zerolora.model.spec import ModelSpec

LAYER = "model.layers.{}"
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def llama_like(
    keys: Keys,
    *,
    key_heads: int,
    head_dim: int,
    tied: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norms: tuple[str, ...] = TWO_NORMS,
    activation: str = "hidden_act",
    default_activation: str = "silu",
) -> ModelSpec:
    """Return the spec of a decoder with Llama's layout. `tied` is the class's default."""
    hidden, layers, heads = basics(keys)
    inner, vocabulary = keys.size("intermediate_size"), keys.size("vocab_size")
    tied = keys.flag("tie_word_embeddings", tied)
    query, key = heads * head_dim, key_heads * head_dim
    modules = (
        embedding("model.embed_tokens", vocabulary, hidden),
        linear(f"{LAYER}.self_attn.q_proj", hidden, query, qkv_bias, layers),
        linear(f"{LAYER}.self_attn.k_proj", hidden, key, qkv_bias, layers),
        linear(f"{LAYER}.self_attn.v_proj", hidden, key, qkv_bias, layers),
        linear(f"{LAYER}.self_attn.o_proj", query, hidden, o_bias, layers),
        *(rms(f"{LAYER}.self_attn.{name}", head_dim, layers) for name in ("q_norm", "k_norm") if qk_norm),
        linear(f"{LAYER}.mlp.gate_proj", hidden, inner, mlp_bias, layers),
        linear(f"{LAYER}.mlp.up_proj", hidden, inner, mlp_bias, layers),
        linear(f"{LAYER}.mlp.down_proj", inner, hidden, mlp_bias, layers),
        *(rms(f"{LAYER}.{name}", hidden, layers) for name in norms),
        rms("model.norm", hidden),
        head(hidden, vocabulary, tied),
    )
    return ModelSpec(
        family=keys.family,
        modules=modules,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied,
        norm="rms",
        norms_per_layer=len(norms),
        activation=keys.text(activation, default_activation),
        qk_norm=qk_norm,
        gated=True,
        rotary=1.0,
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )


def basics(keys: Keys) -> tuple[int, int, int]:
    return keys.size("hidden_size"), keys.size("num_hidden_layers"), keys.size("num_attention_heads")


def _llama(keys: Keys) -> ModelSpec:
    hidden, _, heads = basics(keys)
    head_dim, bias = keys.divided(hidden, heads), keys.flag("attention_bias", False)
    return llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=heads, null=heads),
        head_dim=keys.size("head_dim", default=head_dim, null=head_dim),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


FAMILIES = {"llama": _llama}
