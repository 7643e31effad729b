"""Falcon, old and new decoder architecture."""

from zerolora.model.families.keys import Keys
from zerolora.model.families.modules import embedding, head, layer_norm, linear
from zerolora.model.spec import ModelSpec


def _falcon(keys: Keys) -> ModelSpec:
    hidden = keys.size("n_embed", "hidden_size")
    layers, heads = keys.size("num_hidden_layers"), keys.size("num_attention_heads")
    head_dim, vocabulary = keys.divided(hidden, heads), keys.size("vocab_size")
    new, alibi = keys.flag("new_decoder_architecture", False), keys.flag("alibi", False)
    parallel, bias = keys.flag("parallel_attn", True), keys.flag("bias", False)
    tied = keys.flag("tie_word_embeddings", True)
    inner = keys.size("ffn_hidden_size", default=4 * hidden, null=4 * hidden)
    # num_kv_heads counts in the new architecture only; before, keys and values have one head or all.
    old_key_heads = 1 if keys.flag("multi_query", True) else heads
    key_heads = keys.size("num_kv_heads", default=heads, null=heads) if new else old_key_heads
    norms, layer = _falcon_norms(keys, new, parallel), "transformer.h.{}"
    modules = (
        embedding("transformer.word_embeddings", vocabulary, hidden),
        linear(f"{layer}.self_attention.query_key_value", hidden, (heads + 2 * key_heads) * head_dim, bias, layers),
        linear(f"{layer}.self_attention.dense", hidden, hidden, bias, layers),
        linear(f"{layer}.mlp.dense_h_to_4h", hidden, inner, bias, layers),
        linear(f"{layer}.mlp.dense_4h_to_h", inner, hidden, bias, layers),
        *(layer_norm(f"{layer}.{name}", hidden, layers) for name in norms),
        layer_norm("transformer.ln_f", hidden),
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
        norm="layer",
        norms_per_layer=len(norms),
        softmax_in_fp32=False,
        attentions=("sdpa", "eager"),
        # The new architecture repeats the keys of a group itself.
        fused_attention=new or key_heads == heads,
        activation=keys.text("activation", "gelu"),
        parallel=new or parallel,
        rotary=0.0 if alibi else 1.0,
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("hidden_dropout", 0.0),
    )


def _falcon_norms(keys: Keys, new: bool, parallel: bool) -> tuple[str, ...]:
    if not parallel:
        return ("post_attention_layernorm", "input_layernorm")
    usual = 2 if new else 1
    count = keys.size("num_ln_in_parallel_attn", default=usual, null=usual)
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)


FAMILIES = {"falcon": _falcon}
