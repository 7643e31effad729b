"""The linear modules of a layer on the memory tracer. What a method adds to them is in methods/."""

import functools
from dataclasses import dataclass
from typing import Protocol

from zerolora.model.operations import Operations
from zerolora.model.spec import ModelSpec, Module
from zerolora.model.tracer import MemoryTracer, Parameter, Value
from zerolora.types import Attention, Loss

# The role of a linear module in a layer, by the end of its path.
ROLES = {
    "q": (".q_proj", "SelfAttention.q"),
    "k": (".k_proj", "SelfAttention.k"),
    "v": (".v_proj", "SelfAttention.v"),
    "q_a": (".q_a_proj",),
    "q_b": (".q_b_proj",),
    "kv_a": (".kv_a_proj_with_mqa",),
    "kv_b": (".kv_b_proj",),
    "qkv": (".qkv_proj", ".c_attn", ".query_key_value"),
    "o": (".o_proj", ".out_proj", "attn.c_proj", "attention.dense", "SelfAttention.o"),
    "gate": (".gate_proj", ".wi_0"),
    "up": (".up_proj", ".fc1", ".c_fc", ".dense_h_to_4h", ".wi", ".wi_1"),
    "gate_up": (".gate_up_proj",),
    "down": (".down_proj", ".fc2", "mlp.c_proj", ".dense_4h_to_h", ".wo"),
    "shared_gate": (".shared_expert_gate",),
}


@dataclass(frozen=True)
class ForwardSpec:
    """One micro-batch of one rank."""

    rows: int
    length: int
    """Tokens of each row that the rank holds, padding counted."""
    width: int
    """Bytes of an activation, and of a weight that is not quantized."""
    attention: Attention
    masked: bool
    """Whether attention gets a mask, as it does for packed and for padded rows; flash never needs one."""
    checkpointing: bool
    loss: Loss
    """full: transformers' own, whose outputs are held until the end of the step. supervised: logits of the last
    `logits` positions only. fused: a chunk of tokens at a time (Liger, arXiv 2410.10989)."""
    logits: int
    """Positions of a row that get logits."""
    saves_inputs: bool = False
    """Whether frozen linear modules save their input, as DeepSpeed's do under stage 3
    (deepspeed/runtime/zero/linear.py)."""
    exchanges: bool = False
    """Whether ranks that share rows exchange heads and tokens around attention (train/sequence_parallel.py)."""
    on_cpu: bool = False
    """Whether the CPU's kernels compute it, not CUDA's."""
    weight_width: int = 0
    """Bytes of an element that quantized modules compute with; 0 = `width`."""
    half: bool = False
    """Whether activations are in fp16, for which CUDA's softmax has a kernel of its own."""
    offloads: bool = False
    """Whether the inputs of checkpointed layers are moved to the host (train/activation_offload.py)."""


class TracedMethod(Protocol):
    """What the trace of a layer needs of a training method."""

    @property
    def trains_base(self) -> bool:
        """Whether the base model's own weights are trained."""

    @property
    def rows(self) -> int:
        """Rows of the embedding, and of a head of its own, that are trained though the whole is not."""

    def project(self, layer: "Projections", module: Module, role: str, value: Value) -> Value:
        """Trace a linear module with what the method adds to it; `role` is q, k, v, o, gate, up or down."""


@dataclass(frozen=True)
class Trained:
    """The trained part of the model."""

    method: TracedMethod | None
    """None if nothing is trained."""
    ranks: tuple[tuple[str, int], ...]
    """Path and r of each adapted linear module."""
    width: int
    """Bytes of a weight that the method adds, as it is computed with."""
    share: float
    """The share of each gradient that a rank keeps until the optimizer step."""
    bucket: float = 0.0
    """Bytes of the buckets that the engine allocates with the first gradient."""
    kept: int = 0
    """Bytes of a trained weight and of its gradient, if copies in another width are computed with; 0 if none are."""

    @property
    def trains_base(self) -> bool:
        """Whether the base model's own weights are trained."""
        return self.method is not None and self.method.trains_base

    @property
    def rows(self) -> int:
        """Rows of the embedding that are trained."""
        return 0 if self.method is None else self.method.rows


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer."""

    experts: Module
    router: Module | None
    shared: bool
    """An MLP beside the experts sees every token; its modules have the roles gate, up and down."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter of the experts; empty if there is none of this name."""
        return dict(self.experts.weights).get(name, ())


@dataclass(frozen=True)
class LayerKind:
    """One kind of layer."""

    roles: dict[str, Module]
    mixture: ExpertLayer | None
    """None for a layer with an MLP."""
    count: int
    """Layers of this kind."""


NOTHING = Trained(None, (), 0, 0.0)
"""Nothing is trained, as in evaluation of the base model."""


class Projections(Operations):
    """The linear modules of a layer, for one model, micro-batch and method."""

    def __init__(self, model: ModelSpec, step: ForwardSpec, trained: Trained) -> None:
        super().__init__(MemoryTracer(trained.bucket))
        self.model, self.step, self.trained = model, step, trained
        self.tokens = step.rows * step.length
        self.ranks = dict(trained.ranks)
        self.kinds = layer_kinds(model)
        self.roles, self.mixture = self.kinds[0].roles, self.kinds[0].mixture
        self.reached_modules: dict[str, int] = {}
        self.at = ""

    def reach(self, path: str) -> None:
        """Note the most bytes live since the module before was reached, under its path."""
        self.reached_modules[self.at] = self.tracer.most_since()
        self.at = path

    def become(self, kind: int) -> None:
        """Trace a layer of this kind from now on."""
        self.roles, self.mixture = self.kinds[kind].roles, self.kinds[kind].mixture

    def projection(self, role: str, value: Value) -> Value:
        """A linear module of the layer, with what the method adds to it."""
        module, method = self.roles[role], self.trained.method
        self.reach(module.path)
        return method.project(self, module, role, value) if method else self.frozen(value, module)

    def frozen(self, value: Value, module: Module) -> Value:
        """A frozen linear module."""
        # GPT-2's Conv1D is no torch.nn.functional.linear, which is what DeepSpeed replaces.
        saves = self.step.saves_inputs and module.kind == "linear"
        return self.linear(value, module.inputs, module.outputs, saves=saves)

    def broadcast(self, vector: Value, like: Value) -> Value:
        """A trained vector that is broadcast: it takes no bytes, but its product has the wider of both dtypes."""
        return Value(vector.storage, 1, max(self.trained.width, like.width), vector.source)

    def adapter_weight(self, count: float) -> Parameter:
        """A trained weight that the method adds."""
        return self._trained(count, self.trained.width)

    def trained_weight(self, count: float) -> Parameter:
        """A weight of the base model, all of which is trained."""
        return self._trained(count, self.step.width)

    def _trained(self, count: float, width: int) -> Parameter:
        return Parameter(self.tracer, count, self.trained.kept or width, self.trained.share, width)


@functools.lru_cache(maxsize=64)
def layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of a model, in the order of their first layers."""
    beside = {module for modules, _ in model.layer_kinds for module in modules}
    attention = [module for module in model.in_layers if module not in beside]
    kinds = []
    for modules, count in model.layer_kinds:
        linears = [each for each in (*attention, *modules) if each.kind in ("linear", "conv1d")]
        found = {role: module for role, ends in ROLES.items() for module in linears if module.path.endswith(ends)}
        kinds.append(LayerKind(typical(model) | found, _mixture(model, modules, "up" in found), count))
    return tuple(kinds)


def _mixture(model: ModelSpec, modules: tuple[Module, ...], shared: bool) -> ExpertLayer | None:
    """Return the experts of a layer with these modules, None if it has none."""
    experts = next((module for module in modules if module.kind == "experts"), None)
    if not model.experts or (experts is None and any(module.kind == "experts" for module in model.modules)):
        return None
    if experts is None or not {"down_proj"} <= {name for name, _ in experts.weights}:
        sizes = (model.experts, 2 * model.inner if model.gated else model.inner, model.hidden)
        down = (model.experts, model.hidden, model.inner)
        experts = Module("", "experts", (("gate_up_proj", sizes), ("down_proj", down)), model.layers)
    router = next((module for module in modules if module.kind == "router" or module.name == "gate"), None)
    return ExpertLayer(experts, router, shared)


def typical(model: ModelSpec) -> dict[str, Module]:
    """Return the projections of a layer from the model's sizes alone, for models with other module names."""
    queries, keys = model.heads * model.head_dim, model.key_heads * model.head_dim
    sizes = {
        "q": (model.hidden, queries),
        "k": (model.hidden, keys),
        "v": (model.hidden, keys),
        "o": (queries, model.hidden),
        "up": (model.hidden, model.inner),
        "down": (model.inner, model.hidden),
    }
    if model.gated:
        sizes["gate"] = sizes["up"]
    return {
        role: Module("", "linear", (("weight", (outputs, inputs)),), model.layers, inputs, outputs)
        for role, (inputs, outputs) in sizes.items()
    }
