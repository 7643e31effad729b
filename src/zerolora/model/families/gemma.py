"""Gemma 1, 2 and 3 (text)."""

from dataclasses import replace

from zerolora.model.families.keys import Keys
from zerolora.model.families.llama import FOUR_NORMS, basics, llama_like
from zerolora.model.spec import ModelSpec, supported_attentions


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
    found = supported_attentions(flash=True, sdpa=False, softcap=spec.softcap_attention, sinks=False)
    return replace(spec, attentions=found)


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


FAMILIES = {"gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3}
