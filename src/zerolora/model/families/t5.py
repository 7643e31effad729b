"""T5."""

from dataclasses import replace

from zerolora.model.families.keys import Keys
from zerolora.model.families.modules import embedding, head, linear, rms
from zerolora.model.spec import ModelSpec, Module


def _t5(keys: Keys) -> ModelSpec:
    """Return the spec of a T5. Its head is always tied: T5Config forces tie_word_embeddings to true."""
    encoder_layers = keys.size("num_hidden_layers", "num_layers")
    layers = keys.size("num_decoder_layers", default=encoder_layers, null=encoder_layers)
    activation, gated = _activation(keys)
    hidden, heads = keys.size("hidden_size", "d_model"), keys.size("num_attention_heads", "num_heads")
    head_dim, inner = keys.size("head_dim", "d_kv", default=64), keys.size("d_ff")
    buckets = keys.size("relative_attention_num_buckets", default=32)
    vocabulary, dropout = keys.size("vocab_size"), keys.rate("dropout_rate", 0.1)

    def attention(path: str, name: str, count: int) -> tuple[Module, ...]:
        width = heads * head_dim
        return (
            *(linear(f"{path}.{name}.{each}", hidden, width, count=count) for each in ("q", "k", "v")),
            linear(f"{path}.{name}.o", width, hidden, count=count),
            rms(f"{path}.layer_norm", hidden, count),
        )

    def stack(name: str, count: int) -> tuple[Module, ...]:
        block = f"{name}.block.{{}}.layer"
        bias = embedding(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias", buckets, heads)
        cross = attention(f"{block}.1", "EncDecAttention", count) if name == "decoder" else ()
        mlp, up = f"{block}.{2 if cross else 1}", ("wi_0", "wi_1") if gated else ("wi",)
        *projections, norm = attention(f"{block}.0", "SelfAttention", count)
        return (
            *projections,
            bias,
            norm,
            *cross,
            *(linear(f"{mlp}.DenseReluDense.{each}", hidden, inner, count=count) for each in up),
            replace(linear(f"{mlp}.DenseReluDense.wo", inner, hidden, count=count), quantizable=False),
            rms(f"{mlp}.layer_norm", hidden, count),
            rms(f"{name}.final_layer_norm", hidden),
        )

    return ModelSpec(
        family=keys.family,
        modules=(
            embedding("shared", vocabulary, hidden),
            *stack("encoder", encoder_layers),
            *stack("decoder", layers),
            head(hidden, vocabulary, tied=True),
        ),
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=heads,
        head_dim=head_dim,
        inner=inner,
        vocabulary=vocabulary,
        tied=True,
        norm="rms",
        norms_per_layer=3,
        attentions=("sdpa", "eager"),
        softmax_in_fp32=False,
        activation=activation,
        gated=gated,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        encoder_layers=encoder_layers,
    )


def _activation(keys: Keys) -> tuple[str, bool]:
    """Return the activation, and whether the MLP is gated, from relu or gated-gelu."""
    value = keys.text("feed_forward_proj", "relu")
    gate, _, name = value.rpartition("-")
    if gate not in ("", "gated"):
        raise keys.wrong("feed_forward_proj", "an activation, as in relu, or gated- and one, as in gated-gelu")
    return "gelu_new" if value == "gated-gelu" else name, gate == "gated"


FAMILIES = {"t5": _t5}
