"""T5."""

from dataclasses import dataclass, replace

from zerolora.model.families.keys import Keys
from zerolora.model.families.modules import embedding, head, linear, rms
from zerolora.model.spec import ModelSpec, Module


@dataclass(frozen=True)
class _T5Sizes:
    hidden: int
    heads: int
    head_dim: int
    inner: int
    gated: bool
    buckets: int


def _t5(keys: Keys) -> ModelSpec:
    """Return the spec of a T5. Its head is always tied: T5Config forces tie_word_embeddings to true."""
    encoder_layers = keys.size("num_hidden_layers", "num_layers")
    layers = keys.size("num_decoder_layers", default=encoder_layers, null=encoder_layers)
    activation, gated = _t5_activation(keys)
    sizes = _T5Sizes(
        hidden=keys.size("hidden_size", "d_model"),
        heads=keys.size("num_attention_heads", "num_heads"),
        head_dim=keys.size("head_dim", "d_kv", default=64),
        inner=keys.size("d_ff"),
        gated=gated,
        buckets=keys.size("relative_attention_num_buckets", default=32),
    )
    vocabulary, dropout = keys.size("vocab_size"), keys.rate("dropout_rate", 0.1)
    modules = (
        embedding("shared", vocabulary, sizes.hidden),
        *_t5_stack("encoder", encoder_layers, sizes),
        *_t5_stack("decoder", layers, sizes),
        head(sizes.hidden, vocabulary, tied=True),
    )
    return ModelSpec(
        family=keys.family,
        modules=modules,
        layers=layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        key_heads=sizes.heads,
        head_dim=sizes.head_dim,
        inner=sizes.inner,
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


def _t5_activation(keys: Keys) -> tuple[str, bool]:
    """Return the activation and whether the MLP is gated, out of relu or gated-gelu."""
    said = keys.text("feed_forward_proj", "relu")
    gate, _, name = said.rpartition("-")
    if gate not in ("", "gated"):
        raise keys.wrong("feed_forward_proj", "an activation, as in relu, or gated- and one, as in gated-gelu")
    return "gelu_new" if said == "gated-gelu" else name, gate == "gated"


def _t5_stack(stack: str, layers: int, sizes: _T5Sizes) -> tuple[Module, ...]:
    block, hidden = f"{stack}.block.{{}}.layer", sizes.hidden
    bias = embedding(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias", sizes.buckets, sizes.heads)
    cross = _t5_attention(f"{block}.1", "EncDecAttention", layers, sizes) if stack == "decoder" else ()
    mlp = f"{block}.{2 if cross else 1}"
    up = ("wi_0", "wi_1") if sizes.gated else ("wi",)
    itself = _t5_attention(f"{block}.0", "SelfAttention", layers, sizes)
    return (
        *itself[:-1],
        bias,
        itself[-1],
        *cross,
        *(linear(f"{mlp}.DenseReluDense.{name}", hidden, sizes.inner, count=layers) for name in up),
        replace(linear(f"{mlp}.DenseReluDense.wo", sizes.inner, hidden, count=layers), quantizable=False),
        rms(f"{mlp}.layer_norm", hidden, layers),
        rms(f"{stack}.final_layer_norm", hidden),
    )


def _t5_attention(path: str, name: str, layers: int, sizes: _T5Sizes) -> tuple[Module, ...]:
    width = sizes.heads * sizes.head_dim
    return (
        *(linear(f"{path}.{name}.{each}", sizes.hidden, width, count=layers) for each in ("q", "k", "v")),
        linear(f"{path}.{name}.o", width, sizes.hidden, count=layers),
        rms(f"{path}.layer_norm", sizes.hidden, layers),
    )


FAMILIES = {"t5": _t5}
