"""The linear modules of a layer and their adapters on the tape, as transformers and peft write them.

Sources: peft/tuners/lora/layer.py, bnb.py and dora.py, peft/tuners/ia3/layer.py.
"""

from dataclasses import dataclass

from zerolora.memory.model_spec import ModelSpec, Module
from zerolora.memory.operations import Operations
from zerolora.memory.tracer import MemoryTracer, Parameter, Value
from zerolora.types import Attention, Loss, Method

# Which projection a linear module of a layer is, by the end of its path.
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
    """full: transformers' own, whose outputs are held until the step is over. supervised: logits of the last
    `logits` positions only. fused: a chunk of tokens at a time (Liger, arXiv 2410.10989)."""
    logits: int
    """Positions of a row that get logits."""
    saves_inputs: bool = False
    """Whether linear modules save their input although they are frozen, as DeepSpeed's do under stage 3
    (deepspeed/runtime/zero/linear.py)."""


@dataclass(frozen=True)
class Trained:
    """What of the model is trained."""

    method: Method
    ranks: tuple[tuple[str, int], ...]
    """Path and r of each adapted linear module."""
    width: int
    """Bytes of an adapter weight."""
    share: float
    """What a rank keeps of each gradient until the step."""
    dropout: bool = False
    """Whether the adapters' input is dropped from."""
    bucket: float = 0.0
    """Bytes of the buckets that the engine makes once there is a gradient."""


class Projections(Operations):
    """What a layer's linear modules need to know: the model, the micro-batch, and what is trained."""

    def __init__(self, shape: ModelSpec, step: ForwardSpec, trained: Trained) -> None:
        super().__init__(MemoryTracer(trained.bucket))
        self.shape, self.step, self.trained = shape, step, trained
        self.tokens = step.rows * step.length
        self.ranks = dict(trained.ranks)
        in_layer = [module for module in shape.linears if "{}" in module.path]
        found = {role: module for role, ends in ROLES.items() for module in in_layer if module.path.endswith(ends)}
        self.roles = typical(shape) | found

    def projection(self, role: str, value: Value) -> Value:
        """A linear module of the layer, with its adapter if it has one."""
        module, trained = self.roles[role], self.trained
        if trained.method == "full":
            return self.linear(value, module.inputs, module.outputs, self.trained_weight(module.parameters))
        r = self.ranks.get(module.path, 0)
        if trained.method == "ia3":
            return self.rescaled(value, module, role == "down") if r else self.frozen(value, module)
        result = self.frozen(value, module)
        if not r:
            return result
        if trained.method == "dora":
            return self.decomposed(value, result, module, r)
        if trained.method == "qlora":
            result = self.unary(result)  # peft/tuners/lora/bnb.py clones it
        return self.adapted(value, result, module, r)

    def frozen(self, value: Value, module: Module) -> Value:
        """A frozen linear module; a quantized one is unpacked for as long as it is multiplied."""
        if self.trained.method != "qlora":
            # GPT-2's Conv1D is no torch.nn.functional.linear, which is what DeepSpeed replaces.
            saves = self.step.saves_inputs and module.kind == "linear"
            return self.linear(value, module.inputs, module.outputs, saves=saves)
        new, count, width = self.tape.new, value.count, value.width
        unpacked = new(module.inputs * module.outputs, width)
        result = new(count / module.inputs * module.outputs, width)
        del unpacked

        def backward(gradient: Value) -> list[Value]:
            again = new(module.inputs * module.outputs, width)
            found = [new(count, width)]
            del again
            return found

        result.source = self.tape.node([value], [], backward)
        return result

    def adapted(self, value: Value, result: Value, module: Module, r: int) -> Value:
        """result + B(A(x))·scale, in the adapter's width (peft/tuners/lora/layer.py, Linear.forward)."""
        width, before = self.trained.width, result.width
        value = self.cast(value, width)
        if self.trained.dropout:
            value = self.dropped(value)
        update = self.unary(self.update(value, module, r))
        if self.trained.method == "qlora":  # peft/tuners/lora/bnb.py adds in the result's width
            update = self.cast(update, before)
        return self.cast(self.add(result, update), before)

    def update(self, value: Value, module: Module, r: int) -> Value:
        """B(A(x))."""
        width, share = self.trained.width, self.trained.share
        first = Parameter(self.tape, module.inputs * r, width, share)
        second = Parameter(self.tape, module.outputs * r, width, share)
        return self.linear(self.linear(value, module.inputs, r, first), r, module.outputs, second)

    def decomposed(self, value: Value, result: Value, module: Module, r: int) -> Value:
        """DoRA: the update's product with a unit matrix gives the norm of each output (peft/tuners/lora/dora.py)."""
        new, width, before = self.tape.new, self.trained.width, result.width
        value = self.cast(value, width)
        if self.trained.dropout:
            # What is dropped from is multiplied again with the whole weight, in the adapter's width.
            value = self.dropped(value)
            whole = new(module.inputs * module.outputs, width if width != self.step.width else 0)
            base = self.matmul(value, whole, value.count / module.inputs * module.outputs)
        else:
            base = result
        unit = new(module.inputs**2, width)
        weight = self.update(unit, module, r)
        unpacked = new(weight.count, width) if width != self.step.width else None
        scaled = new(weight.count, width)
        total = new(weight.count, width)
        square = new(weight.count, width)
        del scaled, total, square, unpacked, unit
        magnitude = self.of(Parameter(self.tape, module.outputs, width, self.trained.share))
        update = self.update(value, module, r)
        kept = self.mul(self.sized(magnitude, base, width), base)
        change = self.add(kept, self.unary(self.mul(self.sized(magnitude, base, width), update)))
        del kept, weight, base
        result = self.add(result, change)
        return self.cast(result, before)

    def sized(self, vector: Value, like: Value, width: float) -> Value:
        """A trained vector that is broadcast: it has no bytes, but its product has another width."""
        return Value(vector.storage, 1, max(width, like.width), vector.source)

    def rescaled(self, value: Value, module: Module, feedforward: bool) -> Value:
        """(IA)³: the input of the MLP's last module, or another module's result, times a vector (peft/tuners/ia3)."""
        width, before = self.trained.width, value.width
        vector = self.of(Parameter(self.tape, module.outputs, width, self.trained.share))
        if not feedforward:
            result = self.frozen(value, module)
            return self.cast(self.mul(result, self.sized(vector, result, width)), before)
        value = self.cast(value, width)
        return self.frozen(self.cast(self.mul(value, vector), before), module)

    def trained_weight(self, count: float) -> Parameter:
        """A weight of the base model, all of which is trained."""
        return Parameter(self.tape, count, self.step.width, self.trained.share)


def typical(shape: ModelSpec) -> dict[str, Module]:
    """Return the projections of a layer by the model's sizes alone, for those that are named otherwise."""
    queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    sizes = {
        "q": (shape.hidden, queries),
        "k": (shape.hidden, keys),
        "v": (shape.hidden, keys),
        "o": (queries, shape.hidden),
        "up": (shape.hidden, shape.inner),
        "down": (shape.inner, shape.hidden),
    }
    if shape.gated:
        sizes["gate"] = sizes["up"]
    return {
        role: Module("", "linear", (("weight", (outputs, inputs)),), shape.layers, inputs, outputs)
        for role, (inputs, outputs) in sizes.items()
    }
