"""The linear modules of a layer on the memory tracer. What a method adds to them is in methods/."""

from dataclasses import dataclass

from zerolora.memory.model_spec import ModelSpec, Module
from zerolora.memory.operations import Operations
from zerolora.memory.tracer import MemoryTracer, Parameter, Value
from zerolora.methods.base import Method
from zerolora.types import Attention, Loss

# The role of a linear module in a layer, by the end of its path.
ROLES = {
    "q": (".q_proj", "SelfAttention.q"),
    "k": (".k_proj", "SelfAttention.k"),
    "v": (".v_proj", "SelfAttention.v"),
    "qkv": (".qkv_proj", ".c_attn", ".query_key_value"),
    "o": (".o_proj", ".out_proj", "attn.c_proj", "attention.dense", "SelfAttention.o"),
    "gate": (".gate_proj", ".wi_0"),
    "up": (".up_proj", ".fc1", ".c_fc", ".dense_h_to_4h", ".wi", ".wi_1"),
    "gate_up": (".gate_up_proj",),
    "down": (".down_proj", ".fc2", "mlp.c_proj", ".dense_4h_to_h", ".wo"),
}


@dataclass(frozen=True)
class ForwardSpec:
    """One micro-batch of one rank."""

    rows: int
    length: int
    """Tokens of each row, padding counted."""
    width: int
    """Bytes of a frozen weight and of an activation."""
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


@dataclass(frozen=True)
class Trained:
    """The trained part of the model."""

    method: Method | None
    """None if nothing is trained."""
    ranks: tuple[tuple[str, int], ...]
    """Path and r of each adapted linear module."""
    width: int
    """Bytes of an adapter weight."""
    share: float
    """The share of each gradient that a rank keeps until the optimizer step."""
    bucket: float = 0.0
    """Bytes of the buckets that the engine allocates with the first gradient."""

    @property
    def trains_base(self) -> bool:
        """Whether the base model's own weights are trained."""
        return self.method is not None and self.method.trains_base


NOTHING = Trained(None, (), 0, 0.0)
"""Nothing is trained, as in evaluation of the base model."""


class Projections(Operations):
    """The linear modules of a layer, for one model, micro-batch and method."""

    def __init__(self, model: ModelSpec, step: ForwardSpec, trained: Trained) -> None:
        super().__init__(MemoryTracer(trained.bucket))
        self.model, self.step, self.trained = model, step, trained
        self.tokens = step.rows * step.length
        self.ranks = dict(trained.ranks)
        in_layer = [module for module in model.linears if "{}" in module.path]
        found = {role: module for role, ends in ROLES.items() for module in in_layer if module.path.endswith(ends)}
        self.roles = typical(model) | found

    def projection(self, role: str, value: Value) -> Value:
        """A linear module of the layer, with what the method adds to it."""
        module, method = self.roles[role], self.trained.method
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
        return Parameter(self.tracer, count, self.trained.width, self.trained.share)

    def trained_weight(self, count: float) -> Parameter:
        """A weight of the base model, all of which is trained."""
        return Parameter(self.tracer, count, self.step.width, self.trained.share)


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
