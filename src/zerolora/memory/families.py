"""The architectures whose shape is read from config.json alone, one function each.

Source of every path, order, bias and default: transformers 5.23, models/<family>/configuration_<family>.py and
modeling_<family>.py; tests/unit/test_shapes.py compares each parameter with the real class.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.memory.model_spec import ModelSpec, Module


@dataclass(frozen=True)
class Keys:
    """A config.json whose values are checked as they are read. The first of several names that is there counts."""

    config: dict[str, Any]
    where: Path
    family: str

    def size(self, *names: str, default: int | None = None, null: int | None = None) -> int:
        """Return a count of at least 1; `default` where the key is left out, `null` where it is null.

        Without a default the key must be there, though the config classes have one: a file that does not say how
        large the model is would be counted as a model of another size.
        """
        name = self._name(names)
        if name is None:
            if default is None:
                raise UserError(
                    f"{self.where}: has no {names[-1]}, which a {self.family} model needs; fetch the model again"
                )
            return default
        value = self.config[name]
        if value is None and null is not None:
            return null
        # JSON's true is an int to Python.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a whole number of at least 1, without quotes")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def rate(self, name: str, default: float) -> float:
        """Return a number from 0 to 1, such as a dropout."""
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.wrong(name, "a number from 0 to 1")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """Return a name, such as an activation's."""
        value = self.config.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, f"a name such as {default}")
        return value

    def window(self, default: int) -> int:
        """Return sliding_window, 0 where it is null."""
        return (
            0
            if self.config.get("sliding_window", default) == 0
            else self.size("sliding_window", default=default, null=0)
        )

    def capped(self, name: str, default: bool) -> bool:
        """Return whether there is a cap on attention scores or logits."""
        value = self.config.get(name, 1.0 if default else None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise self.wrong(name, "a number above 0, or null")
        return value is not None

    def divided(self, hidden: int, heads: int) -> int:
        """Return the width of a head, in a family whose class refuses any remainder."""
        if hidden % heads:
            raise UserError(
                f"{self.where}: the hidden size {hidden} is not a multiple of the {heads} attention heads, "
                f"which a {self.family} model needs; write one that is, or fetch the model again"
            )
        return hidden // heads

    def wrong(self, name: str, remedy: str) -> UserError:
        """Return the error of a value that no model can be built from."""
        return UserError(f"{self.where}: {name} is {shown(self.config[name])}; write {remedy}")

    def _name(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.config), None)


def _linear(path: str, inputs: int, outputs: int, bias: bool = False, count: int = 1) -> Module:
    return Module(path, "linear", _weights((outputs, inputs), outputs if bias else 0), count, inputs, outputs)


def _conv1d(path: str, inputs: int, outputs: int, count: int) -> Module:
    # GPT-2 writes its linear modules as Conv1D, whose weight is [inputs, outputs].
    return Module(path, "conv1d", _weights((inputs, outputs), outputs), count, inputs, outputs)


def _embedding(path: str, rows: int, width: int) -> Module:
    return Module(path, "embedding", _weights((rows, width)))


def _rms(path: str, width: int, count: int = 1) -> Module:
    return Module(path, "norm", _weights((width,)), count)


def _layer_norm(path: str, width: int, count: int = 1) -> Module:
    return Module(path, "norm", _weights((width,), width), count)


def _head(inputs: int, vocabulary: int, tied: bool) -> Module:
    weights = () if tied else _weights((vocabulary, inputs))
    return Module("lm_head", "head", weights, 1, inputs, vocabulary)


def _weights(shape: tuple[int, ...], bias: int = 0) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("weight", shape), ("bias", (bias,))) if bias else (("weight", shape),)


LAYER = "model.layers.{}"
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _llama_like(
    keys: Keys,
    *,
    key_heads: int,
    head_dim: int,
    positions: int,
    tied: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norms: tuple[str, ...] = TWO_NORMS,
    activation: str = "hidden_act",
    default_activation: str = "silu",
) -> ModelSpec:
    """Return the shape of a decoder with Llama's layout. `positions` and `tied` are the class's defaults."""
    hidden, layers, heads = _basics(keys)
    inner, vocabulary = keys.size("intermediate_size"), keys.size("vocab_size")
    tied = keys.flag("tie_word_embeddings", tied)
    query, key = heads * head_dim, key_heads * head_dim
    modules = (
        _embedding("model.embed_tokens", vocabulary, hidden),
        _linear(f"{LAYER}.self_attn.q_proj", hidden, query, qkv_bias, layers),
        _linear(f"{LAYER}.self_attn.k_proj", hidden, key, qkv_bias, layers),
        _linear(f"{LAYER}.self_attn.v_proj", hidden, key, qkv_bias, layers),
        _linear(f"{LAYER}.self_attn.o_proj", query, hidden, o_bias, layers),
        *(_rms(f"{LAYER}.self_attn.{name}", head_dim, layers) for name in ("q_norm", "k_norm") if qk_norm),
        _linear(f"{LAYER}.mlp.gate_proj", hidden, inner, mlp_bias, layers),
        _linear(f"{LAYER}.mlp.up_proj", hidden, inner, mlp_bias, layers),
        _linear(f"{LAYER}.mlp.down_proj", inner, hidden, mlp_bias, layers),
        *(_rms(f"{LAYER}.{name}", hidden, layers) for name in norms),
        _rms("model.norm", hidden),
        _head(hidden, vocabulary, tied),
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
        positions=keys.size("max_position_embeddings", default=positions),
        tied=tied,
        norm="rms",
        norms_per_layer=len(norms),
        activation=keys.text(activation, default_activation),
        qk_norm=qk_norm,
        gated=True,
        rotary=1.0,
        attention_dropout=keys.rate("attention_dropout", 0.0),
    )


def _basics(keys: Keys) -> tuple[int, int, int]:
    return keys.size("hidden_size"), keys.size("num_hidden_layers"), keys.size("num_attention_heads")


def _llama(keys: Keys) -> ModelSpec:
    hidden, _, heads = _basics(keys)
    head_dim, bias = keys.divided(hidden, heads), keys.flag("attention_bias", False)
    return _llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=heads, null=heads),
        head_dim=keys.size("head_dim", default=head_dim, null=head_dim),
        positions=2048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def _qwen2(keys: Keys) -> ModelSpec:
    hidden, layers, heads = _basics(keys)
    shape = _llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=32, null=heads),
        head_dim=keys.size("head_dim", default=max(hidden // heads, 1)),
        positions=32768,
        qkv_bias=True,
    )
    return replace(shape, sliding_window=_qwen_window(keys, layers))


def _qwen3(keys: Keys) -> ModelSpec:
    _, layers, heads = _basics(keys)
    bias = keys.flag("attention_bias", False)
    shape = _llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=32, null=heads),
        head_dim=keys.size("head_dim", default=128),
        positions=32768,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
    return replace(shape, sliding_window=_qwen_window(keys, layers))


def _qwen_window(keys: Keys, layers: int) -> int:
    """Published files have a sliding_window that no layer uses: it needs the switch, and layers above the limit."""
    used = keys.flag("use_sliding_window", False)
    types = keys.config.get("layer_types")
    slides = "sliding_attention" in types if isinstance(types, list) else _limit(keys) < layers
    return keys.window(4096) if used and slides else 0


def _limit(keys: Keys) -> int:
    # 0 is allowed here: every layer slides.
    return 0 if keys.config.get("max_window_layers") == 0 else keys.size("max_window_layers", default=28)


def _mistral(keys: Keys) -> ModelSpec:
    hidden, _, heads = _basics(keys)
    head_dim = max(hidden // heads, 1)
    shape = _llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=8),
        head_dim=keys.size("head_dim", default=head_dim, null=head_dim),
        positions=131072,
    )
    return replace(shape, sliding_window=keys.window(4096))


def _mixtral(keys: Keys) -> ModelSpec:
    """As Mistral, with all experts of a layer in two parameters of three dimensions, and a router of its own class.

    Neither is an nn.Linear; peft's all-linear adapts them all the same: shapes.expert_adapter_parameters.
    """
    shape = _mistral(keys)
    hidden, inner, layers = shape.hidden, shape.inner, shape.layers
    experts = keys.size("num_experts", "num_local_experts", default=8)
    both = (("gate_up_proj", (experts, 2 * inner, hidden)), ("down_proj", (experts, hidden, inner)))
    mixture = (
        Module(f"{LAYER}.mlp.gate", "router", _weights((experts, hidden)), layers),
        Module(f"{LAYER}.mlp.experts", "experts", both, layers),
    )
    return replace(
        shape,
        modules=_instead(shape.modules, ".mlp.", mixture),
        fused_gate=True,
        sliding_window=keys.window(0),
        experts=experts,
        experts_per_token=keys.size("num_experts_per_tok", default=2),
    )


def _instead(modules: tuple[Module, ...], part: str, others: tuple[Module, ...]) -> tuple[Module, ...]:
    """Return `modules` with `others` in the place of those whose path contains `part`."""
    at = next(place for place, module in enumerate(modules) if part in module.path)
    rest = tuple(module for module in modules if part not in module.path)
    return rest[:at] + others + rest[at:]


def _phi3(keys: Keys) -> ModelSpec:
    hidden, layers, heads = _basics(keys)
    head_dim = keys.size("head_dim", default=max(hidden // heads, 1))
    key_heads = keys.size("num_key_value_heads", default=heads, null=heads)
    shape = _llama_like(keys, key_heads=key_heads, head_dim=head_dim, positions=4096)
    attention = (
        _linear(f"{LAYER}.self_attn.o_proj", heads * head_dim, hidden, count=layers),
        _linear(f"{LAYER}.self_attn.qkv_proj", hidden, (heads + 2 * key_heads) * head_dim, count=layers),
    )
    mlp = (
        _linear(f"{LAYER}.mlp.gate_up_proj", hidden, 2 * shape.inner, count=layers),
        _linear(f"{LAYER}.mlp.down_proj", shape.inner, hidden, count=layers),
    )
    return replace(
        shape,
        modules=_instead(_instead(shape.modules, ".self_attn.", attention), ".mlp.", mlp),
        fused_qkv=True,
        fused_gate=True,
        rotary=_rotated(keys, "partial_rotary_factor", 1.0),
        sliding_window=keys.window(0),
        hidden_dropout=keys.rate("resid_pdrop", 0.0),
    )


def _rotated(keys: Keys, name: str, default: float) -> float:
    """Return the share of a head that is rotated: in rope_parameters since transformers 5, a key of its own before."""
    parameters = keys.config.get("rope_scaling") or keys.config.get("rope_parameters")
    if isinstance(parameters, dict) and "partial_rotary_factor" in parameters:
        return replace(keys, config=parameters).rate("partial_rotary_factor", default)
    return keys.rate(name, default)


def _gemma(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias", False)
    shape = _llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=16),
        head_dim=keys.size("head_dim", default=256),
        positions=8192,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        default_activation="gelu_pytorch_tanh",
    )
    # The first files say gelu and mean its tanh approximation: configuration_gemma.py corrects them.
    activation = "gelu_pytorch_tanh" if shape.activation == "gelu" else shape.activation
    return replace(shape, norm="rms_gemma", scaled_embedding=True, activation=activation)


def _gemma2(keys: Keys) -> ModelSpec:
    return _gemma_with_four_norms(keys, positions=8192, qk_norm=False, capped=True)


def _gemma3(keys: Keys) -> ModelSpec:
    return _gemma_with_four_norms(keys, positions=131072, qk_norm=True, capped=False)


def _gemma_with_four_norms(keys: Keys, positions: int, qk_norm: bool, capped: bool) -> ModelSpec:
    hidden, _, heads = _basics(keys)
    keys.divided(hidden, heads)
    bias = keys.flag("attention_bias", False)
    shape = _llama_like(
        keys,
        key_heads=keys.size("num_key_value_heads", default=4),
        head_dim=keys.size("head_dim", default=256),
        positions=positions,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        norms=FOUR_NORMS,
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
    )
    return replace(
        shape,
        norm="rms_gemma",
        scaled_embedding=True,
        # Gemma 3's attention reads no attn_logit_softcapping, whatever its config says.
        softcap_attention=capped and keys.capped("attn_logit_softcapping", capped),
        softcap_logits=keys.capped("final_logit_softcapping", capped),
        sliding_window=keys.window(4096),
    )


def _gpt2(keys: Keys) -> ModelSpec:
    hidden, layers = keys.size("hidden_size", "n_embd"), keys.size("num_hidden_layers", "n_layer")
    heads, vocabulary = keys.size("num_attention_heads", "n_head"), keys.size("vocab_size")
    head_dim = keys.divided(hidden, heads)
    inner = keys.size("n_inner", default=4 * hidden, null=4 * hidden)
    positions = keys.size("max_position_embeddings", "n_positions", default=1024)
    tied, layer = keys.flag("tie_word_embeddings", True), "transformer.h.{}"
    modules = (
        _embedding("transformer.wte", vocabulary, hidden),
        _embedding("transformer.wpe", positions, hidden),
        _layer_norm(f"{layer}.ln_1", hidden, layers),
        _conv1d(f"{layer}.attn.c_attn", hidden, 3 * hidden, layers),
        _conv1d(f"{layer}.attn.c_proj", hidden, hidden, layers),
        _layer_norm(f"{layer}.ln_2", hidden, layers),
        _conv1d(f"{layer}.mlp.c_fc", hidden, inner, layers),
        _conv1d(f"{layer}.mlp.c_proj", inner, hidden, layers),
        _layer_norm("transformer.ln_f", hidden),
        _head(hidden, vocabulary, tied),
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
        positions=positions,
        tied=tied,
        norm="layer",
        norms_per_layer=2,
        activation=keys.text("activation_function", "gelu_new"),
        fused_qkv=True,
        attention_dropout=keys.rate("attn_pdrop", 0.1),
        hidden_dropout=keys.rate("resid_pdrop", 0.1),
    )


def _gpt_neox(keys: Keys) -> ModelSpec:
    hidden, layers, heads = _basics(keys)
    head_dim = keys.divided(hidden, heads)
    inner, vocabulary = keys.size("intermediate_size"), keys.size("vocab_size")
    tied, bias = keys.flag("tie_word_embeddings", False), keys.flag("attention_bias", True)
    layer = "gpt_neox.layers.{}"
    modules = (
        _embedding("gpt_neox.embed_in", vocabulary, hidden),
        _layer_norm(f"{layer}.input_layernorm", hidden, layers),
        _layer_norm(f"{layer}.post_attention_layernorm", hidden, layers),
        _linear(f"{layer}.attention.query_key_value", hidden, 3 * hidden, bias, layers),
        _linear(f"{layer}.attention.dense", hidden, hidden, bias, layers),
        _linear(f"{layer}.mlp.dense_h_to_4h", hidden, inner, True, layers),
        _linear(f"{layer}.mlp.dense_4h_to_h", inner, hidden, True, layers),
        _layer_norm("gpt_neox.final_layer_norm", hidden),
        _head(hidden, vocabulary, tied),
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
        positions=keys.size("max_position_embeddings", default=2048),
        tied=tied,
        norm="layer",
        norms_per_layer=2,
        activation=keys.text("hidden_act", "gelu"),
        fused_qkv=True,
        parallel=keys.flag("use_parallel_residual", True),
        rotary=_rotated(keys, "rotary_pct", 0.25),
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
        _embedding("transformer.word_embeddings", vocabulary, hidden),
        _linear(f"{layer}.self_attention.query_key_value", hidden, (heads + 2 * key_heads) * head_dim, bias, layers),
        _linear(f"{layer}.self_attention.dense", hidden, hidden, bias, layers),
        _linear(f"{layer}.mlp.dense_h_to_4h", hidden, inner, bias, layers),
        _linear(f"{layer}.mlp.dense_4h_to_h", inner, hidden, bias, layers),
        *(_layer_norm(f"{layer}.{name}", hidden, layers) for name in norms),
        _layer_norm("transformer.ln_f", hidden),
        _head(hidden, vocabulary, tied),
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
        positions=keys.size("max_position_embeddings", default=2048),
        tied=tied,
        norm="layer",
        norms_per_layer=len(norms),
        activation=keys.text("activation", "gelu"),
        fused_qkv=True,
        parallel=new or parallel,
        rotary=0.0 if alibi else 1.0,
        alibi=alibi,
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("hidden_dropout", 0.0),
    )


def _falcon_norms(keys: Keys, new: bool, parallel: bool) -> tuple[str, ...]:
    if not parallel:
        return ("post_attention_layernorm", "input_layernorm")
    usual = 2 if new else 1
    count = keys.size("num_ln_in_parallel_attn", default=usual, null=usual)
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)


def _opt(keys: Keys) -> ModelSpec:
    hidden, layers, heads = _basics(keys)
    head_dim, vocabulary = keys.divided(hidden, heads), keys.size("vocab_size")
    inner, positions = keys.size("ffn_dim"), keys.size("max_position_embeddings", default=2048)
    embedded = keys.size("word_embed_proj_dim", default=hidden, null=hidden)
    tied, bias = keys.flag("tie_word_embeddings", True), keys.flag("enable_bias", True)
    ended = keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False)
    layer = "model.decoder.layers.{}"
    modules = (
        _embedding("model.decoder.embed_tokens", vocabulary, embedded),
        # The first two rows are for padding: modeling_opt.py, OPTLearnedPositionalEmbedding.
        _embedding("model.decoder.embed_positions", positions + 2, hidden),
        *([_linear("model.decoder.project_out", hidden, embedded)] if embedded != hidden else []),
        *([_linear("model.decoder.project_in", embedded, hidden)] if embedded != hidden else []),
        *([_layer_norm("model.decoder.final_layer_norm", hidden)] if ended else []),
        *(_linear(f"{layer}.self_attn.{name}", hidden, hidden, bias, layers) for name in OPT_ATTENTION),
        _layer_norm(f"{layer}.self_attn_layer_norm", hidden, layers),
        _linear(f"{layer}.fc1", hidden, inner, bias, layers),
        _linear(f"{layer}.fc2", inner, hidden, bias, layers),
        _layer_norm(f"{layer}.final_layer_norm", hidden, layers),
        _head(embedded, vocabulary, tied),
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
        positions=positions,
        tied=tied,
        norm="layer",
        norms_per_layer=2,
        activation=keys.text("activation_function", "relu"),
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("dropout", 0.1),
    )


OPT_ATTENTION = ("k_proj", "v_proj", "q_proj", "out_proj")


def _bloom(keys: Keys) -> ModelSpec:
    hidden, vocabulary = keys.size("n_embed", "hidden_size"), keys.size("vocab_size")
    layers = keys.size("num_hidden_layers", "n_layer")
    heads = keys.size("num_attention_heads", "n_head")
    head_dim, tied = keys.divided(hidden, heads), keys.flag("tie_word_embeddings", True)
    layer = "transformer.h.{}"
    modules = (
        _embedding("transformer.word_embeddings", vocabulary, hidden),
        _layer_norm("transformer.word_embeddings_layernorm", hidden),
        _layer_norm(f"{layer}.input_layernorm", hidden, layers),
        _linear(f"{layer}.self_attention.query_key_value", hidden, 3 * hidden, True, layers),
        _linear(f"{layer}.self_attention.dense", hidden, hidden, True, layers),
        _layer_norm(f"{layer}.post_attention_layernorm", hidden, layers),
        _linear(f"{layer}.mlp.dense_h_to_4h", hidden, 4 * hidden, True, layers),
        _linear(f"{layer}.mlp.dense_4h_to_h", 4 * hidden, hidden, True, layers),
        _layer_norm("transformer.ln_f", hidden),
        _head(hidden, vocabulary, tied),
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
        positions=0,
        tied=tied,
        norm="layer",
        norms_per_layer=2,
        # BloomGelu is the tanh approximation in an autograd function of its own: it saves its input only.
        activation="gelu_tanh",
        fused_qkv=True,
        alibi=True,
        attention_dropout=keys.rate("attention_dropout", 0.0),
        hidden_dropout=keys.rate("hidden_dropout", 0.0),
    )


@dataclass(frozen=True)
class _T5Sizes:
    hidden: int
    heads: int
    head_dim: int
    inner: int
    gated: bool
    buckets: int


def _t5(keys: Keys) -> ModelSpec:
    """Return the shape of a T5. Its head is always tied: T5Config forces tie_word_embeddings to true."""
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
        _embedding("shared", vocabulary, sizes.hidden),
        *_t5_stack("encoder", encoder_layers, sizes),
        *_t5_stack("decoder", layers, sizes),
        _head(sizes.hidden, vocabulary, tied=True),
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
        positions=0,
        tied=True,
        norm="rms",
        norms_per_layer=3,
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
    bias = _embedding(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias", sizes.buckets, sizes.heads)
    cross = _t5_attention(f"{block}.1", "EncDecAttention", layers, sizes) if stack == "decoder" else ()
    mlp = f"{block}.{2 if cross else 1}"
    up = ("wi_0", "wi_1") if sizes.gated else ("wi",)
    itself = _t5_attention(f"{block}.0", "SelfAttention", layers, sizes)
    return (
        *itself[:-1],
        bias,
        itself[-1],
        *cross,
        *(_linear(f"{mlp}.DenseReluDense.{name}", hidden, sizes.inner, count=layers) for name in up),
        _linear(f"{mlp}.DenseReluDense.wo", sizes.inner, hidden, count=layers),
        _rms(f"{mlp}.layer_norm", hidden, layers),
        _rms(f"{stack}.final_layer_norm", hidden),
    )


def _t5_attention(path: str, name: str, layers: int, sizes: _T5Sizes) -> tuple[Module, ...]:
    width = sizes.heads * sizes.head_dim
    return (
        *(_linear(f"{path}.{name}.{each}", sizes.hidden, width, count=layers) for each in ("q", "k", "v")),
        _linear(f"{path}.{name}.o", width, sizes.hidden, count=layers),
        _rms(f"{path}.layer_norm", sizes.hidden, layers),
    )


FAMILIES: dict[str, Callable[[Keys], ModelSpec]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "t5": _t5,
}
