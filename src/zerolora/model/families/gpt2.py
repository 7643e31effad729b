"""GPT-2."""

from zerolora.model.families.keys import Keys
from zerolora.model.families.modules import conv1d, embedding, head, layer_norm
from zerolora.model.spec import ModelSpec


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
        softmax_in_fp32=False,
        activation=keys.text("activation_function", "gelu_new"),
        attention_dropout=keys.rate("attn_pdrop", 0.1),
        hidden_dropout=keys.rate("resid_pdrop", 0.1),
    )


FAMILIES = {"gpt2": _gpt2}
