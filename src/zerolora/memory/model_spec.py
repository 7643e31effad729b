"""Sizes of a model: every module that owns parameters, and how a layer computes."""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

ParameterShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each parameter that a module owns itself, not through a submodule."""


@dataclass(frozen=True)
class Module:
    """A module that owns parameters, either once in the model or once in each layer."""

    path: str
    """As in named_modules(), with {} for the layer's number: model.layers.{}.self_attn.q_proj."""
    kind: str
    """linear, conv1d, embedding, head, norm, experts, router or other."""
    weights: ParameterShapes
    """Empty for a head that shares the embedding's weight."""
    count: int = 1
    """1, or the number of layers that have it."""
    inputs: int = 0
    """Of a linear, conv1d or head."""
    outputs: int = 0

    @property
    def name(self) -> str:
        """The last part of the path: q_proj."""
        return self.path.rpartition(".")[2]

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
    """In the order of named_modules(). Modules without a weight of their own are left out, except for a tied head."""
    layers: int
    """Of the decoder, in an encoder-decoder."""
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
    experts: int = 0
    experts_per_token: int = 0
    encoder_layers: int = 0
    counted: str = "config.json"
    """"config.json" or "meta device": where the numbers come from."""

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, each counted once: a tied head adds none."""
        return sum(module.parameters * module.count for module in self.modules)

    def __hash__(self) -> int:
        # Caches are asked for one model tens of thousands of times, and all its modules take long to hash.
        return hash((self.family, self.layers, self.parameters))

    @cached_property
    def linears(self) -> tuple[Module, ...]:
        """The targets of peft's all-linear: every nn.Linear and Conv1D but the output head.

        In a Mixtral, peft adapts the experts as well: methods/lora.py, _expert_parameters.
        """
        return tuple(module for module in self.modules if module.kind in ("linear", "conv1d"))


def to_json(model: ModelSpec) -> dict[str, Any]:
    """Return a model as JSON values."""
    return asdict(model)


def from_json(value: dict[str, Any]) -> ModelSpec:
    """Return the model that to_json wrote."""
    modules = tuple(
        Module(**{**module, "weights": tuple((name, tuple(sizes)) for name, sizes in module["weights"])})
        for module in value["modules"]
    )
    return ModelSpec(**{**value, "modules": modules})
