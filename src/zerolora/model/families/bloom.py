"""BLOOM."""

from zerolora.model.families.keys import Keys
from zerolora.model.families.modules import embedding, head, layer_norm, linear
from zerolora.model.spec import ModelSpec


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
    return ModelSpec(
        family=keys.family,
        modules=modules,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=heads,
        head_dim=head_dim,
        inner=4 * hidden,
        vocabulary=vocabulary,
        tied=tied,
        norm="layer",
        norms_per_layer=2,
        attentions=("eager",),
        # BloomGelu is the tanh approximation in an autograd function of its own: it saves its input only.
        activation="gelu_tanh",
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("hidden_dropout", 0.0),
    )


FAMILIES = {"bloom": _bloom}
