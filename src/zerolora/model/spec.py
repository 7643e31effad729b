"""Sizes of a model: every module that owns parameters, and how a layer computes."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from zerolora.errors import shown
from zerolora.types import Attention

ParameterShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each parameter of a module, without those of submodules."""


@dataclass(frozen=True)
class Module:
    """A module with parameters, once in the model or once in each layer."""

    path: str
    """As in named_modules(), with {} for the layer's number: model.layers.{}.self_attn.q_proj."""
    kind: str
    """linear, conv1d, embedding, head, norm, experts, router, other, or outside: in a part beside the language model,
    such as a vision tower, that is never trained."""
    weights: ParameterShapes
    """Empty for a head that shares the embedding's weight."""
    count: int = 1
    """1, or the number of its layers."""
    inputs: int = 0
    """Of a linear, conv1d or head, also outside."""
    outputs: int = 0
    layers: tuple[int, ...] = ()
    """Numbers of its layers, if they are not the first ones."""
    quantizable: bool = True
    """Whether a linear or conv1d is quantized with bitsandbytes: not if its class computes otherwise than nn.Linear, as
    some routers do, or is kept in fp32 (compat/transformers_patches.py, quantizable_paths)."""
    left_out: bool = False
    """Whether all-linear leaves a linear module out (architecture.left_out)."""

    @property
    def name(self) -> str:
        """The last part of the path: q_proj."""
        return self.path.rpartition(".")[2]

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of its layers."""
        return self.layers or range(self.count)

    @property
    def stack(self) -> str:
        """The path of its list of layers, as in model.layers; empty outside of layers."""
        return self.path.partition(".{}")[0] if "{}" in self.path else ""

    @cached_property
    def parameters(self) -> int:
        """Elements of one copy."""
        return sum(math.prod(shape) for _, shape in self.weights)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The properties of a model that the estimate depends on. Sizes in elements."""

    family: str
    """model_type."""
    modules: tuple[Module, ...]
    """In the order of named_modules(), without modules that have no weight, except for a tied head."""
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int
    """Width of the MLP, of one expert's in a mixture of experts."""
    vocabulary: int
    tied: bool
    """The head shares the embedding's weight."""
    norm: str
    """rms, rms_gemma (x * (1 + w) in fp32) or layer."""
    norms_per_layer: int
    """Norms over the hidden width in a (decoder) layer."""
    activation: str
    """As hidden_act says."""
    qk_norm: bool = False
    gated: bool = False
    """Gate and up projections."""
    parallel: bool = False
    """Attention and MLP read the same input and are added to the same residual."""
    rotary: float = 0.0
    """Share of head_dim that rotary embedding rotates."""
    softcap_attention: bool = False
    softcap_logits: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    scaled_embedding: bool = False
    """Embeddings are multiplied by a constant."""
    softmax_in_fp32: bool = True
    """In eager attention."""
    experts: int = 0
    experts_per_token: int = 0
    former: tuple[tuple[str, str], ...] = ()
    """What files call the modules whose weights a parameter of experts holds, and its name: ("w1", "gate_up_proj")."""
    latent: tuple[int, int, int] | None = None
    """Widths of a head in multi-head latent attention: without rotary embedding, with it, and of a value."""
    fused_attention: bool = True
    """torch's fused kernels can compute it: they need as many heads of keys as of queries, or enable_gqa
    (aten/src/ATen/native/transformers/sdp_utils_cpp.h)."""
    returns_weights: bool = False
    """A layer returns the weights of its eager attention, which also holds their scores before the mask is added."""
    sinks: bool = False
    """Attention has a trained logit for each head beside those of the keys."""
    attentions: tuple[Attention, ...] = ("flash", "sdpa", "eager")
    """Implementations of attention for training, the fastest first (`supported_attentions`)."""
    stored_as: str = ""
    """quant_method of the published weights' quantization_config; empty if they are not quantized."""
    stored_bytes: int = 0
    """Bytes of its files of weights, if these are dequantized whenever they are loaded, else 0."""
    buffers: tuple[int, int] = (0, 0)
    """Of tensors that are no parameters, such as a class's mask of all positions: elements in the run's precision, and
    bytes of the others."""
    counted: str = "config.json"
    """Source of the numbers: "config.json" or "meta device"."""
    config: str = ""
    """The content of config.json, if the layers are traced from the model's class (memory/layer_trace.py); empty if the
    tracer has them operation by operation (memory/layer.py)."""

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, each counted once: a tied head adds none."""
        return sum(module.parameters * module.count for module in self.modules)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that compute a token: all but the experts to which it is not routed, if their number is known."""
        experts = sum(
            module.parameters * module.count
            for module in self.modules
            if module.kind == "experts" or ".experts." in f"{module.path}."
        )
        return self.parameters - (
            experts - experts * self.experts_per_token // self.experts if self.experts_per_token else 0
        )

    def __hash__(self) -> int:
        # A model is looked up in caches tens of thousands of times, and hashing all its modules takes long.
        return hash((self.family, self.layers, self.parameters))

    @cached_property
    def linears(self) -> tuple[Module, ...]:
        """Every nn.Linear and Conv1D but the output head."""
        return tuple(module for module in self.modules if module.kind in ("linear", "conv1d"))

    @cached_property
    def in_layers(self) -> tuple[Module, ...]:
        """The modules of the language model's layers; of the largest stack if there are several, as with a tower."""
        sizes: dict[str, int] = defaultdict(int)
        for module in self.modules:
            if module.stack and module.kind != "outside":
                sizes[module.stack] += module.parameters * module.count
        stack = max(sizes, key=lambda name: sizes[name])
        return tuple(module for module in self.modules if module.stack == stack)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[tuple[Module, ...], int], ...]:
        """Each kind of layer: its modules beside attention, and the number of layers with exactly these."""
        kinds: dict[tuple[Module, ...], int] = defaultdict(int)
        beside = [
            module
            for module in self.in_layers
            if module.kind in ("linear", "conv1d", "experts", "router")
            and "ttention" not in module.path
            and "attn" not in module.path
        ]
        if all(module.count == self.layers for module in beside):
            return ((tuple(beside), self.layers),)
        for number in range(self.layers):
            kinds[tuple(module for module in beside if number in module.numbers)] += 1
        return tuple(kinds.items())

    def largest_layer(self, size: Callable[[Module], float]) -> float:
        """Return the size of the largest layer, from that of each module."""
        sizes: dict[int, float] = defaultdict(float)
        for module in self.in_layers:
            each = size(module)
            for number in module.numbers:
                sizes[number] += each
        return max(sizes.values())


SIZES = {
    "layers": "number of layers",
    "hidden": "hidden size",
    "heads": "number of attention heads",
    "key_heads": "number of key-value heads",
    "head_dim": "width of a head",
    "inner": "width of the MLP",
    "vocabulary": "vocabulary size",
}
"""Sizes for the memory tracer, which the meta device does not have for every architecture."""


def fault_of_sizes(model: ModelSpec, names: Sequence[str] = tuple(SIZES)) -> str | None:
    """Return why the memory tracer cannot have a model's layers operation by operation; None if it can."""
    for name in names:
        value = getattr(model, name)
        if not isinstance(value, int) or value < 1:
            return f"{shown(value)} is not a {SIZES[name]} that the memory of a {model.family} can be traced with"
    if "heads" in names and not any("attn" in each.path.replace("ttention", "attn") for each in model.in_layers):
        return f"a {model.family} has no attention"
    return None


def supported_attentions(flash: bool, sdpa: bool, softcap: bool) -> tuple[Attention, ...]:
    """Return the implementations of attention for training a model, the fastest first.

    `flash`: it can compute with this project's (attention_trial.why_not); `sdpa`: with transformers' (_supports_sdpa).
    No fused kernel caps scores.
    """
    if softcap:
        return ("eager",)
    has: dict[Attention, bool] = {"flash": flash, "sdpa": sdpa, "eager": True}
    return tuple(name for name, result in has.items() if result)


def with_rows(model: ModelSpec, rows: int) -> ModelSpec:
    """Return a model with `rows` more rows of embedding and head, for added tokens: an upper bound, since some models
    have spare rows."""
    if not rows:
        return model
    many = model.vocabulary + rows

    def grown(module: Module) -> Module:
        shapes = tuple(
            (name, (many, *shape[1:]) if shape[0] == model.vocabulary else shape) for name, shape in module.weights
        )
        return replace(module, weights=shapes, outputs=many if module.kind == "head" else module.outputs)

    modules = tuple(grown(each) if each.kind in ("embedding", "head") else each for each in model.modules)
    return replace(model, modules=modules, vocabulary=many)


def to_json(model: ModelSpec) -> dict[str, Any]:
    """Return a model as JSON values."""
    return asdict(model)


def from_json(value: dict[str, Any]) -> ModelSpec:
    """Return the model that to_json wrote."""
    modules = tuple(
        Module(
            **{
                **module,
                "weights": tuple((name, tuple(sizes)) for name, sizes in module["weights"]),
                "layers": tuple(module["layers"]),
            }
        )
        for module in value["modules"]
    )
    latent = tuple(value["latent"]) if value["latent"] else None
    former = tuple((old, new) for old, new in value["former"])
    tuples = {name: tuple(value[name]) for name in ("attentions", "buffers")}
    return ModelSpec(**{**value, **tuples, "modules": modules, "latent": latent, "former": former})


LEAST_CHUNK = 256
"""Minimum tokens of a chunk of logits: with fewer, reading the head's weight takes longer than the products."""
EVALUATION_TOKENS = 2048
"""Tokens of one forward pass of evaluation without generation, padding included."""
FEWEST = 8
"""Minimum tokens of a common prefix that training computes once (train/common_prefix.py): a shorter one saves less than
its part of attention costs."""
WORTH = 1 / 16
"""Minimum share of a micro-batch's tokens that are then not computed again. With less, the copies of keys and values
that each row sees may take more memory than the tokens save."""


def chunk_size(tokens: float, hidden: int, vocabulary: int) -> int:
    """Return the tokens of a micro-batch whose logits are computed at once, at least LEAST_CHUNK: their logits are
    about as large as the hidden states of all tokens (liger_kernel/ops/fused_linear_cross_entropy.py)."""
    fair = max(1, math.ceil(tokens / math.ceil(vocabulary / hidden)))
    return max(LEAST_CHUNK, int(2 ** math.ceil(math.log2(fair))))
