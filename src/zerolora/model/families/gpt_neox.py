"""GPT-NeoX and Pythia."""

from zerolora.model.families.keys import Keys
from zerolora.model.families.llama import basics
from zerolora.model.families.modules import embedding, head, layer_norm, linear
from zerolora.model.spec import ModelSpec


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
    return ModelSpec(
        family=keys.family,
        modules=modules,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=vocabulary,
        tied=tied,
        norm="layer",
        norms_per_layer=2,
        activation=keys.text("hidden_act", "gelu"),
        parallel=keys.flag("use_parallel_residual", True),
        rotary=keys.rotary_share("rotary_pct", 0.25),
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("hidden_dropout", 0.0),
    )


FAMILIES = {"gpt_neox": _gpt_neox}
