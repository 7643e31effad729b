"""Llama, and the families with its layout: Gemma, Mistral, Mixtral, Phi-3, Qwen."""

from dataclasses import replace

from zerolora.model.families.keys import Keys
from zerolora.model.families.modules import embedding, head, linear, replaced, rms, weight_shapes
from zerolora.model.spec import ModelSpec, Module, supported_attentions

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


def _mistral(keys: Keys) -> ModelSpec:
    hidden, _, heads = basics(keys)
    head_dim = max(hidden // heads, 1)
    return llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=8),
        head_dim=keys.size("head_dim", default=head_dim, null=head_dim),
    )


def _mixtral(keys: Keys) -> ModelSpec:
    """Like Mistral, with all experts of a layer in two three-dimensional parameters, and a router class of its own."""
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
        former=(("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj")),
    )


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


def _gemma(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias", False)
    spec = llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=16),
        head_dim=keys.size("head_dim", default=256),
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        default_activation="gelu_pytorch_tanh",
    )
    # The first files say gelu and mean its tanh approximation: configuration_gemma.py corrects them.
    activation = "gelu_pytorch_tanh" if spec.activation == "gelu" else spec.activation
    return replace(spec, norm="rms_gemma", scaled_embedding=True, activation=activation)


def _gemma2(keys: Keys) -> ModelSpec:
    spec = _gemma_with_four_norms(keys, qk_norm=False, capped=True)
    result = supported_attentions(flash=True, sdpa=False, softcap=spec.softcap_attention)
    return replace(spec, attentions=result)


def _gemma3(keys: Keys) -> ModelSpec:
    return _gemma_with_four_norms(keys, qk_norm=True, capped=False)


def _gemma_with_four_norms(keys: Keys, qk_norm: bool, capped: bool) -> ModelSpec:
    hidden, _, heads = basics(keys)
    keys.divided(hidden, heads)
    bias = keys.flag("attention_bias", False)
    spec = llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=4),
        head_dim=keys.size("head_dim", default=256),
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        norms=FOUR_NORMS,
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
    )
    return replace(
        spec,
        norm="rms_gemma",
        scaled_embedding=True,
        # Gemma 3's attention reads no attn_logit_softcapping, whatever its config says.
        softcap_attention=capped and keys.capped("attn_logit_softcapping", capped),
        softcap_logits=keys.capped("final_logit_softcapping", capped),
    )


FAMILIES = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
