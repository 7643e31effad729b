"""OPT."""

from zerolora.model.families.keys import Keys
from zerolora.model.families.llama import basics
from zerolora.model.families.modules import embedding, head, layer_norm, linear
from zerolora.model.spec import ModelSpec

OPT_ATTENTION = ("k_proj", "v_proj", "q_proj", "out_proj")


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
    return ModelSpec(
        family=keys.family,
        modules=tuple(module for module in modules if affine or module.kind != "norm"),
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
        activation=keys.text("activation_function", "relu"),
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("dropout", 0.1),
    )


FAMILIES = {"opt": _opt}
