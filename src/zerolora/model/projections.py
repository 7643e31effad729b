"""A layer's linear modules on the memory tracer. Methods add their adapters (methods/)."""

import functools
from dataclasses import dataclass
from typing import Protocol

from zerolora.model.fused_kernels import Part
from zerolora.model.operations import Operations
from zerolora.model.spec import ModelSpec, Module
from zerolora.model.tracer import MemoryTracer, Parameter, Value
from zerolora.types import Attention, Loss

# The roles of linear modules in a layer, by the ends of their paths.
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
    """Tokens of each row on the rank, padding included."""
    width: int
    """Bytes of an activation, and of an unquantized weight."""
    attention: Attention
    masked: bool
    """Whether attention gets a mask, for packed or padded rows; flash never needs one."""
    checkpointing: bool
    loss: Loss
    """full: transformers' loss, whose outputs live until the end of the step. supervised: logits of the last `logits`
    positions only. fused: a chunk of tokens at a time (Liger, arXiv 2410.10989)."""
    logits: int
    """Positions of a row with logits."""
    saves_inputs: bool = False
    """Whether frozen linear modules save their input, as DeepSpeed's do under stage 3
    (deepspeed/runtime/zero/linear.py)."""
    exchanges: bool = False
    """Whether ranks that share rows exchange heads and tokens around attention (train/sequence_parallel.py)."""
    on_cpu: bool = False
    """Whether the kernels are the CPU's instead of CUDA's."""
    weight_width: int = 0
    """Bytes of an element in which quantized modules compute; 0 = `width`."""
    half: bool = False
    """Whether activations are fp16, which CUDA's softmax reads without a copy."""
    capability: float | None = None
    """Compute capability of the GPU; None for one that has flash attention."""
    shared_by: int = 1
    """Ranks that share rows, if they `exchanges`."""
    offloads: bool = False
    """Whether the inputs of checkpointed layers move to the host (train/activation_offload.py)."""
    kernels: tuple[Part, ...] = ()
    """What liger-kernel computes (fused_kernels.py)."""
    packed: float = 1.0
    """Rows of a packed row."""


class TracedMethod(Protocol):
    """The part of methods.method.Method that traces a layer."""

    @property
    def trains_base(self) -> bool:
        """Whether the base model's weights are trained."""

    @property
    def rows(self) -> int:
        """Trained rows of an otherwise frozen embedding, and of an untied head."""

    @property
    def unpacks_experts(self) -> bool:
        """Whether the weights of a layer's experts are unpacked while it computes."""

    def project(self, layer: "Projections", module: Module, role: str, value: Value) -> Value:
        """Trace a linear module with the method's adapter; `role` is a key of ROLES."""


@dataclass(frozen=True)
class Trained:
    """The trained part of the model."""

    method: TracedMethod | None
    """None if nothing is trained."""
    ranks: tuple[tuple[str, int], ...]
    """Path and r of each adapted linear module."""
    width: int
    """Bytes of an added weight in computation."""
    share: float
    """Share of each gradient that a rank keeps until the optimizer step."""
    bucket: float = 0.0
    """Bytes of the engine's gradient buckets, allocated with the first gradient."""
    kept: int = 0
    """Bytes of a trained weight and of its gradient where computation uses copies in another width; otherwise 0."""

    @property
    def trains_base(self) -> bool:
        """Whether the base model's weights are trained."""
        return self.method is not None and self.method.trains_base

    @property
    def rows(self) -> int:
        """Trained rows of the embedding."""
        return 0 if self.method is None else self.method.rows

    @property
    def unpacks_experts(self) -> bool:
        """Whether the weights of a layer's experts are unpacked while it computes."""
        return self.method is not None and self.method.unpacks_experts


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer."""

    experts: Module
    router: Module | None
    shared: bool
    """Whether an MLP beside the experts computes every token; its modules have the roles gate, up and down."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter of the experts; empty if it does not exist."""
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
"""For evaluation of the base model."""


class Projections(Operations):
    """A layer's linear modules, for one model, micro-batch and method."""

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
        """Begin a module, and record the peak bytes since the module before, under that one's path."""
        self.reached_modules[self.at] = self.tracer.most_since()
        self.at = path

    def become(self, kind: int) -> None:
        """Trace layers of this kind from now on."""
        self.roles, self.mixture = self.kinds[kind].roles, self.kinds[kind].mixture

    def projection(self, role: str, value: Value) -> Value:
        """Trace a linear module of the layer with the method's adapter."""
        module, method = self.roles[role], self.trained.method
        self.reach(module.path)
        return method.project(self, module, role, value) if method else self.frozen(value, module)

    def frozen(self, value: Value, module: Module) -> Value:
        """Trace a frozen linear module."""
        # DeepSpeed replaces torch.nn.functional.linear, which GPT-2's Conv1D does not call.
        saves = self.step.saves_inputs and module.kind == "linear"
        return self.linear(value, module.inputs, module.outputs, saves=saves)

    def broadcast(self, vector: Value, like: Value) -> Value:
        """Trace a broadcast trained vector: without bytes, but its product has the wider of both dtypes."""
        return Value(vector.storage, 1, max(self.trained.width, like.width), vector.source)

    def adapter_weight(self, count: float) -> Parameter:
        """Return a new trained weight of the adapter."""
        return self._trained(count, self.trained.width)

    def trained_weight(self, count: float) -> Parameter:
        """Return a new trained weight of the base model."""
        return self._trained(count, self.step.width)

    def _trained(self, count: float, width: int) -> Parameter:
        return Parameter(self.tracer, count, self.trained.kept or width, self.trained.share, width)


@functools.lru_cache(maxsize=64)
def layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    """Return a model's kinds of layers, ordered by their first layer."""
    beside = {module for modules, _ in model.layer_kinds for module in modules}
    attention = [module for module in model.in_layers if module not in beside]
    kinds = []
    for modules, count in model.layer_kinds:
        linears = [each for each in (*attention, *modules) if each.kind in ("linear", "conv1d")]
        result = {role: module for role, ends in ROLES.items() for module in linears if module.path.endswith(ends)}
        kinds.append(LayerKind(typical(model) | result, _mixture(model, modules, "up" in result), count))
    return tuple(kinds)


def _mixture(model: ModelSpec, modules: tuple[Module, ...], shared: bool) -> ExpertLayer | None:
    """Return the experts of a layer with these modules; None for a layer with an MLP."""
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
    """Return a layer's projections from the model's sizes alone, for models with other module names."""
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
