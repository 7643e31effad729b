"""Families with layer norms: BLOOM, Falcon, GPT-2, GPT-NeoX and Pythia, OPT."""

from typing import Any

from zerolora.model.families.keys import Keys
from zerolora.model.families.llama import basics
from zerolora.model.families.modules import conv1d, embedding, head, layer_norm, linear
from zerolora.model.spec import ModelSpec, Module

OPT_ATTENTION = ("k_proj", "v_proj", "q_proj", "out_proj")


def _with_layer_norms(keys: Keys, modules: tuple[Module, ...], *, heads: int, **values: Any) -> ModelSpec:
    """Return a spec with layer norms: by default two in each layer, and as many heads of keys as of queries."""
    values = {"key_heads": heads, "norms_per_layer": 2} | values
    return ModelSpec(family=keys.family, modules=modules, heads=heads, norm="layer", **values)


def _bloom(keys: Keys) -> ModelSpec:
    hidden, vocabulary = keys.size("n_embed", "hidden_size"), keys.size("vocab_size")
    layers = keys.size("num_hidden_layers", "n_layer")
    heads = keys.size("num_attention_heads", "n_head")
    head_dim, tied = keys.divided(hidden, heads), keys.flag("tie_word_embeddings", True)
    layer = "transformer.h.{}"
    modules = (
        embedding("transformer.word_embeddings", vocabulary, hidden),
        layer_norm("transformer.word_embeddings_layernorm", hidden),
        layer_norm(f"{layer}.input_layernorm", hidden, layers),
        linear(f"{layer}.self_attention.query_key_value", hidden, 3 * hidden, True, layers),
        linear(f"{layer}.self_attention.dense", hidden, hidden, True, layers),
        layer_norm(f"{layer}.post_attention_layernorm", hidden, layers),
        linear(f"{layer}.mlp.dense_h_to_4h", hidden, 4 * hidden, True, layers),
        linear(f"{layer}.mlp.dense_4h_to_h", 4 * hidden, hidden, True, layers),
        layer_norm("transformer.ln_f", hidden),
        head(hidden, vocabulary, tied),
    )
    return _with_layer_norms(
        keys,
        modules,
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        inner=4 * hidden,
        vocabulary=vocabulary,
        tied=tied,
        attentions=("eager",),
        returns_weights=True,
        # BloomGelu is the tanh approximation in an autograd function of its own: it saves its input only.
        activation="gelu_tanh",
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("hidden_dropout", 0.0),
    )


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
    return _with_layer_norms(
        keys,
        modules,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied,
        norms_per_layer=len(norms),
        softmax_in_fp32=False,
        returns_weights=True,
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


def _gpt2(keys: Keys) -> ModelSpec:
    hidden, layers = keys.size("hidden_size", "n_embd"), keys.size("num_hidden_layers", "n_layer")
    heads, vocabulary = keys.size("num_attention_heads", "n_head"), keys.size("vocab_size")
    head_dim = keys.divided(hidden, heads)
    inner = keys.size("n_inner", default=4 * hidden, null=4 * hidden)
    positions = keys.size("max_position_embeddings", "n_positions", default=1024)
    tied, layer = keys.flag("tie_word_embeddings", True), "transformer.h.{}"
    modules = (
        embedding("transformer.wte", vocabulary, hidden),
        embedding("transformer.wpe", positions, hidden),
        layer_norm(f"{layer}.ln_1", hidden, layers),
        conv1d(f"{layer}.attn.c_attn", hidden, 3 * hidden, layers),
        conv1d(f"{layer}.attn.c_proj", hidden, hidden, layers),
        layer_norm(f"{layer}.ln_2", hidden, layers),
        conv1d(f"{layer}.mlp.c_fc", hidden, inner, layers),
        conv1d(f"{layer}.mlp.c_proj", inner, hidden, layers),
        layer_norm("transformer.ln_f", hidden),
        head(hidden, vocabulary, tied),
    )
    return _with_layer_norms(
        keys,
        modules,
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied,
        softmax_in_fp32=False,
        activation=keys.text("activation_function", "gelu_new"),
        attention_dropout=keys.rate("attn_pdrop", 0.1),
        hidden_dropout=keys.rate("resid_pdrop", 0.1),
    )


def _gpt_neox(keys: Keys) -> ModelSpec:
    hidden, layers, heads = basics(keys)
    head_dim = keys.divided(hidden, heads)
    inner, vocabulary = keys.size("intermediate_size"), keys.size("vocab_size")
    tied, bias = keys.flag("tie_word_embeddings", False), keys.flag("attention_bias", True)
    layer = "gpt_neox.layers.{}"
    modules = (
        embedding("gpt_neox.embed_in", vocabulary, hidden),
        layer_norm(f"{layer}.input_layernorm", hidden, layers),
        layer_norm(f"{layer}.post_attention_layernorm", hidden, layers),
        linear(f"{layer}.attention.query_key_value", hidden, 3 * hidden, bias, layers),
        linear(f"{layer}.attention.dense", hidden, hidden, bias, layers),
        linear(f"{layer}.mlp.dense_h_to_4h", hidden, inner, True, layers),
        linear(f"{layer}.mlp.dense_4h_to_h", inner, hidden, True, layers),
        layer_norm("gpt_neox.final_layer_norm", hidden),
        head(hidden, vocabulary, tied),
    )
    return _with_layer_norms(
        keys,
        modules,
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied,
        activation=keys.text("hidden_act", "gelu"),
        parallel=keys.flag("use_parallel_residual", True),
        rotary=keys.rotary_share("rotary_pct", 0.25),
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("hidden_dropout", 0.0),
    )


def _opt(keys: Keys) -> ModelSpec:
    hidden, layers, heads = basics(keys)
    head_dim, vocabulary = keys.divided(hidden, heads), keys.size("vocab_size")
    inner, positions = keys.size("ffn_dim"), keys.size("max_position_embeddings", default=2048)
    embedded = keys.size("word_embed_proj_dim", default=hidden, null=hidden)
    tied, bias = keys.flag("tie_word_embeddings", True), keys.flag("enable_bias", True)
    ended = keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False)
    layer = "model.decoder.layers.{}"
    modules = (
        embedding("model.decoder.embed_tokens", vocabulary, embedded),
        # The first two rows are for padding: modeling_opt.py, OPTLearnedPositionalEmbedding.
        embedding("model.decoder.embed_positions", positions + 2, hidden),
        *([linear("model.decoder.project_out", hidden, embedded)] if embedded != hidden else []),
        *([linear("model.decoder.project_in", embedded, hidden)] if embedded != hidden else []),
        *([layer_norm("model.decoder.final_layer_norm", hidden)] if ended else []),
        *(linear(f"{layer}.self_attn.{name}", hidden, hidden, bias, layers) for name in OPT_ATTENTION),
        layer_norm(f"{layer}.self_attn_layer_norm", hidden, layers),
        linear(f"{layer}.fc1", hidden, inner, bias, layers),
        linear(f"{layer}.fc2", inner, hidden, bias, layers),
        layer_norm(f"{layer}.final_layer_norm", hidden, layers),
        head(embedded, vocabulary, tied),
    )
    affine = keys.flag("layer_norm_elementwise_affine", True)
    return _with_layer_norms(
        keys,
        tuple(module for module in modules if affine or module.kind != "norm"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied,
        activation=keys.text("activation_function", "relu"),
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("dropout", 0.1),
    )


FAMILIES = {"bloom": _bloom, "falcon": _falcon, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt}
