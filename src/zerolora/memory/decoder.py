"""One training step of a decoder on the memory tracer: embedding, layers, loss, backward.

Variables have the same lifetime as in the model code, since lifetimes decide the peak. layer.py has the layers,
projections.py their linear modules. Sources: transformers/models/*/modeling_*.py, loss/loss_utils.py;
torch/utils/checkpoint.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

from zerolora.errors import UserError
from zerolora.memory.layer import Layer
from zerolora.memory.layer_trace import fault_of_tracing, layer_trace
from zerolora.memory.traced_parts import BACKWARD, WORK, LayerTrace, TracedPart, TracedPass
from zerolora.methods.method import Method
from zerolora.model.projections import ForwardSpec, Trained, layer_kinds
from zerolora.model.spec import ModelSpec, chunk_size, fault_of_sizes
from zerolora.model.tracer import MemoryTracer, Node, Parameter, Value
from zerolora.strategies.strategy import LayerWork, PassWork

Phases = dict[str, dict[str, int]]


@functools.lru_cache(maxsize=16384)
def phases(model: ModelSpec, step: ForwardSpec, trained: Trained) -> Phases:
    """Return the peak bytes of forward, loss and backward, by kind and in total.

    Layers of a kind add equal bytes, so models of up to three layers, or of two of each kind, are traced, and models of
    one layer less; others are extrapolated linearly. Backward has two phases: its beginning, with all activations
    saved, and its end, with all gradients. Further entries: "small_blocks", the peak of blocks in a heap (tracer.py,
    SMALL); "modules", the peak of the last layer's forward pass from each module to the next, by path; "kept", the
    bytes that all layers keep for the backward pass; "offloaded", the bytes that they keep on the host.
    """
    if decoder := traced_decoder(model, step, trained):
        return decoder.run()
    counts = [kind.count for kind in layer_kinds(model)]
    most = 3 if len(counts) == 1 else 2
    traced = tuple(min(count, most) for count in counts)
    result = Decoder(model, traced, step, trained).run()
    added: Phases = {phase: {} for phase in result}
    for kind, count in enumerate(counts):
        if count <= most:
            continue
        less = Decoder(model, (*traced[:kind], most - 1, *traced[kind + 1 :]), step, trained).run()
        for phase, kinds in result.items():
            for name, value in kinds.items():
                more = (count - most) * (value - less[phase].get(name, 0))
                added[phase][name] = added[phase].get(name, 0) + more
    return {
        phase: {name: value + added[phase].get(name, 0) for name, value in kinds.items()}
        for phase, kinds in result.items()
    }


@functools.lru_cache(maxsize=16384)
def evaluation(model: ModelSpec, step: ForwardSpec, trained: Trained) -> int:
    """Return the peak bytes of a forward pass without gradients."""
    if decoder := traced_decoder(model, step, trained):
        return decoder.evaluate()
    counts = tuple(min(kind.count, 2) for kind in layer_kinds(model))
    return Decoder(model, counts, step, trained).evaluate()


def pinned(size: float) -> int:
    """Return the bytes that torch allocates for `size` bytes of pinned memory: a power of two
    (ATen/core/CachingHostAllocator.h, allocate)."""
    return 1 << max(0, math.ceil(size) - 1).bit_length()


class Decoder(Layer):
    """A decoder with `counts` layers of each kind."""

    def __init__(self, model: ModelSpec, counts: tuple[int, ...], step: ForwardSpec, trained: Trained) -> None:
        super().__init__(model, step, trained)
        self.layers = sum(counts)
        self.order = [kind for kind, count in enumerate(counts) for _ in range(count)]
        self.embedded = self.trained_weight(model.vocabulary * model.hidden)
        self.leaf: Value | None = None
        self.offloaded = 0
        self.reached: Callable[[str], None] = lambda phase: None

    def run(self) -> Phases:
        """Run one step and return the peak of each phase."""
        tracer, step = self.tracer, self.step
        result: Phases = {}

        def end(phase: str) -> None:
            if tracer.peak > result.get(phase, {}).get("total", 0):
                result[phase] = {**tracer.at_peak, "total": tracer.peak}
            tracer.restart()

        ids = [tracer.new(self.tokens, 8) for _ in range(3)]  # input_ids, labels, position_ids
        tables = self.tables()
        mask = self.mask()
        if mask and step.attention == "eager":
            mask = tracer.new(step.rows * step.length**2, step.width)
        before = tracer.live
        hidden = [self.body(mask)]
        self.reach("")
        result["modules"] = dict(self.reached_modules)
        result["kept"] = {"total": tracer.live - before}
        result["offloaded"] = {"total": self.offloaded}
        end("forward")
        tracer.kind = "logits"
        loss, held = self.head(hidden.pop())
        end("loss")
        self.reached = end
        tracer.backward(loss, tracer.new(1, 4))
        end("backward_end" if "backward" in result else "backward")
        result["small_blocks"] = {"total": tracer.small_peak}
        del ids, tables, mask, held
        return result

    def evaluate(self) -> int:
        """Run a forward pass without gradients; return its peak bytes."""
        self.tracer.recording = False
        mask = self.mask()
        loss, held = self.head(self.body(mask))
        del mask, loss, held
        return self.tracer.peak

    def tables(self) -> list[Value]:
        """Return the tables of positions that all layers use."""
        return [
            self.tracer.new(self.tokens * self.model.head_dim, self.step.width)
            for _ in range(2 * bool(self.model.rotary))
        ]

    def mask(self) -> Value | None:
        """Return the mask of attention, None without one."""
        step = self.step
        return self.tracer.new(step.rows * step.length**2, 1) if step.masked and step.attention != "flash" else None

    def body(self, mask: Value | None) -> Value:
        """Embedding, layers, last norm."""
        hidden = self.embedding()
        for number, kind in enumerate(self.order):
            hidden = self.marked(hidden, number)
            if self.step.checkpointing:
                hidden = self.checkpointed(hidden, mask, kind)
            else:
                hidden = self.layer(hidden, mask, kind)
        self.returned = None
        return self.last_norm(hidden)

    def last_norm(self, hidden: Value) -> Value:
        """Trace what comes between the layers and the head."""
        return self.norm(hidden)

    def embedding(self) -> Value:
        """Trace the embedded tokens, which need a gradient for a trained embedding, or for checkpointing."""
        new, model = self.tracer.new, self.model
        hidden = new(self.tokens * model.hidden, self.step.width)
        if self.trained.trains_base:
            hidden.source = self.tracer.node(
                [self.of(self.embedded)], [], lambda gradient: [new(model.vocabulary * model.hidden, self.step.width)]
            )
        elif self.step.checkpointing and not self.trained.rows:
            hidden.source = Parameter(self.tracer, hidden.count, hidden.width, 0)
            self.leaf = hidden  # the graph refers to the tensor that gets the gradient
        if model.scaled_embedding:
            hidden = self.unary(hidden)
        if self.trained.rows:
            hidden = self.with_rows(hidden)
        return self.dropped(hidden) if model.hidden_dropout else hidden

    def with_rows(self, hidden: Value) -> Value:
        """Trace the embedded tokens with trained rows (train/module_forwards.py); torch.where saves its condition."""
        new, count, width = self.tracer.new, hidden.count, hidden.width
        own, condition = new(count, width), new(self.tokens, 1)
        result = new(count, width)
        size = self.trained.rows * self.model.hidden
        rows = self.of(self.adapter_weight(size))

        def backward(gradient: Value) -> list[Value]:
            of_own = new(count, width)
            of_rows = new(size, width)
            del of_own
            return [of_rows]

        result.source = self.tracer.node([rows], [condition], backward)
        del own
        return result

    def marked(self, hidden: Value, number: int) -> Value:
        """Trace a view of a layer's input whose backward pass ends a phase: most activations are live when the backward
        pass reaches the last layer, most gradients at the first."""
        result = self.view(hidden)
        node = result.source
        if isinstance(node, Node):

            def passing(gradient: Value) -> list[Value]:
                if number == self.layers - 1 > 0:
                    self.reached("backward")
                if number == 1:
                    self.before_first()
                return [gradient]

            node.backward = passing
        return result

    def before_first(self) -> None:
        """End the backward passes between the last layer's and the first one's, which take no more than these."""
        self.tracer.restart()

    def checkpointed(self, hidden: Value, mask: Value | None, kind: int) -> Value:
        """Trace a layer that is recomputed in the backward pass (torch.utils.checkpoint, reentrant)."""
        tracer = self.tracer
        tracer.recording = False
        result = self.layer(hidden, mask, kind)
        tracer.recording = True
        # The node saves its input only.
        count, width = hidden.count, hidden.width
        offloads = self.step.offloads and not (self.leaf and hidden.storage is self.leaf.storage)
        if offloads:
            self.offloaded += pinned(count * width)
        saved = [] if offloads else [hidden.storage]

        def backward(gradient: Value) -> list[Value]:
            counted, tracer.kind = tracer.kind, "activations"
            leaf = Input(tracer, count, width)
            # Freed when this function returns.
            storage = saved.pop() if saved else tracer.new(count, width).storage
            again = self.layer(Value(storage, count, width, leaf), mask, kind)
            # torch gives what else the layer returns a gradient of zeros.
            returned, self.returned = self.returned, None
            zeros = returned and tracer.new(returned.count, returned.width)
            tracer.backward(again, gradient)
            del returned, zeros
            tracer.kind = counted
            assert leaf.gradient
            return [leaf.gradient]

        result.source = tracer.node([hidden], [] if offloads else [hidden], backward)
        return result

    def head(self, hidden: Value) -> tuple[Value, Value | None]:
        """Return the loss, and the logits if the loop keeps them."""
        model, step = self.model, self.step
        positions = step.rows * (step.logits or step.length)
        if step.loss == "fused":
            chosen = self.chosen(hidden, positions)
            del hidden
            return self.fused_loss(chosen), None
        kept = self.slice(hidden, positions / self.tokens) if positions < self.tokens else hidden
        weight = None
        if self.trained.trains_base:
            weight = self.embedded if model.tied else self.trained_weight(model.vocabulary * model.hidden)
        logits = self.linear(kept, model.hidden, model.vocabulary, weight, self.step.saves_inputs)
        if model.softcap_logits:
            logits = self.unary(self.unary(self.unary(logits), "output"))
        return self.cross_entropy(logits), logits if step.loss == "full" else None

    def chosen(self, hidden: Value, positions: float) -> Value:
        """Trace the hidden states of some positions (index_select); the gradient is as large as the whole."""
        new, count, width = self.tracer.new, hidden.count, hidden.width
        result = new(positions * self.model.hidden, width)
        result.source = self.tracer.node([hidden], [], lambda gradient: [new(count, width)])
        return result

    def fused_loss(self, hidden: Value) -> Value:
        """Loss and gradient, a chunk of tokens at a time, both in the forward pass (train/loss.py)."""
        model, width, new = self.model, self.step.width, self.tracer.new
        tokens = hidden.count / model.hidden
        gradient = new(hidden.count, width) if hidden.needs_gradient else None
        size = min(tokens, chunk_size(tokens, model.hidden, model.vocabulary))
        logits = new(size * model.vocabulary, width)
        if "loss" not in self.step.kernels or self.trained.rows or self.trained.trains_base:  # one writes over them
            in_fp32 = self.cast(logits, 4)
            del logits
            if model.softcap_logits and gradient:
                slope = new(size * model.vocabulary, 4)
                del slope
            if gradient:
                as_weight = self.cast(in_fp32, width)
                del as_weight
            del in_fp32
        loss = new(1, 4)
        count = hidden.count
        saved = [gradient] if gradient else []
        if self.trained.rows:
            saved.append(hidden)  # for the gradient of the head's rows
        loss.source = self.tracer.node([hidden], saved, lambda _: [new(count, width)])
        return loss

    def cross_entropy(self, logits: Value) -> Value:
        """log_softmax in fp32, whose result is saved; the backward pass allocates two more of its size."""
        new, count = self.tracer.new, logits.count
        in_fp32 = self.cast(logits, 4)
        del logits
        log_softmax = new(count, 4)
        log_softmax.source = self.tracer.node([in_fp32], [log_softmax], lambda gradient: [new(count, 4)])
        loss = new(1, 4)
        loss.source = self.tracer.node([log_softmax], [], lambda gradient: [new(count, 4)])
        return loss


class TracedDecoder(Decoder):
    """A decoder whose layers are traced from the model's class (layer_trace.py): each is one operation."""

    def __init__(self, model: ModelSpec, step: ForwardSpec, trained: Trained, trace: LayerTrace) -> None:
        super().__init__(model, (model.layers,), step, trained)
        self.trace = trace
        self.layers, self.order = len(trace.order), list(trace.order)
        self.loose: list[Value] = []
        """What comes before the layers, until their forward pass ends."""
        self.held: list[Value] = []
        """The same, until the backward pass ends."""

    def size(self, part: TracedPart, name: str) -> float:
        """Return bytes of a part at the size of the rows."""
        return part.at(name, self.step.rows, self.step.length, self.step.packed)

    def work(self) -> LayerWork:
        """Return the work of all layers in a micro-step."""
        layers = [self.trace.layers[kind] for kind in self.order]

        def of_pass(end: str) -> PassWork:
            counted = {name: sum(self.size(part, f"{name}{end}") for part in layers) for name in WORK}
            rows = self.step.rows, self.step.length, self.step.packed
            counted["operations"] = sum(self.size(part, f"operations{end}") * part.calls(*rows) for part in layers)
            return PassWork(**counted)

        return LayerWork(of_pass(""), of_pass(BACKWARD))

    def tables(self) -> list[Value]:
        """Return all that is live before the layers beside the embedded tokens: also masks."""
        before, new = self.trace.before, self.tracer.new
        loose = self.size(before, "loose")
        self.loose.append(new(loose, 1))
        return [new(max(0.0, self.size(before, "kept") - self.tokens * self.trace.hidden - loose), 1)]

    def mask(self) -> Value | None:
        """Return None: the tables have it."""
        return None

    def embedding(self) -> Value:
        """Trace the embedded tokens, in the width of what a layer passes on."""
        hidden = super().embedding()
        hidden = self.repeat(hidden, self.tokens * self.trace.hidden / (hidden.count * hidden.width))
        (self.loose if self.size(self.trace.before, "input") else self.held).append(hidden)
        return hidden

    def before_first(self) -> None:
        """End the backward passes between the last layer's and the first one's; layers of another kind may take more
        than these."""
        self.reached("backward")

    def layer(self, hidden: Value, mask: Value | None, kind: int = 0) -> Value:
        """Trace a layer of one kind."""
        part = self.trace.layers[kind] if hidden.needs_gradient or self.trained.trains_base else self.trace.first
        size = self.tokens * self.trace.hidden
        freed = self.size(part, "input") if isinstance(hidden.source, Input) else 0.0
        kept = self.part(part, hidden, size, freed)
        return Value(kept.storage, size / hidden.width, hidden.width, kept.source)

    def last_norm(self, hidden: Value) -> Value:
        """Trace what comes between the layers and the head, and free what no layer saves."""
        before, after, checkpointing = self.trace.before, self.trace.after, self.step.checkpointing
        size = self.tokens * self.model.hidden * self.step.width
        given = self.size(after, "input")
        # The trace's last layer has its result; a checkpointed one does not keep it.
        freed = self.size(before, "loose") + self.size(before, "input") + checkpointing * given
        kept = self.part(after, hidden, size, freed)
        if not checkpointing:
            self.loose.clear()
        if not given:
            self.held.append(hidden)
        result = self.tracer.new(size / self.step.width, self.step.width)
        result.source = kept.source
        return result

    def part(self, part: TracedPart, hidden: Value, size: float, freed: float) -> Value:
        """Trace a part of the model that passes on `size` bytes; return what it keeps, or without gradients its result.
        `freed`: bytes that were not in its trace after it."""
        new, width, before = self.tracer.new, hidden.width, hidden.count
        gradients = self.size(part, "gradients") / self.trained.width if self.tracer.recording else 0
        if not (self.tracer.recording and (hidden.needs_gradient or gradients)):
            # The layer before still has what it returned.
            temporary = new(self.size(part, "alone") + self.size(part, "returned"), 1)
            del temporary
            return new(size, 1)
        of_gradients = self.size(part, "with_gradients") - self.size(part, "backward")
        backward_peak = self.size(part, "backward") + self.trained.share * of_gradients
        if part is not self.trace.after and not isinstance(hidden.source, Input):
            # What follows has freed its result, if nothing saves that, but the trace counts it as kept here.
            backward_peak = max(0.0, backward_peak - self.size(self.trace.after, "input"))
        if isinstance(hidden.source, Input):
            # It is held as the layer's result, and torch gives it a gradient of zeros.
            backward_peak += 2 * self.size(part, "returned")
        inputs = self.size(part, "inputs") if self.step.saves_inputs else 0.0
        temporary = new(self.size(part, "forward") + inputs, 1)
        del temporary
        kept = new(self.size(part, "kept") + inputs + freed, 1)
        weights = [self.of(self.adapter_weight(gradients))] if gradients else []
        storages = [kept.storage, *(each.storage for each in weights)]

        def backward(_: Value) -> list[Value]:
            temporary = new(backward_peak, 1)
            del temporary
            storages.clear()
            return [new(before, width), *(new(gradients, self.trained.width) for _ in weights)]

        kept.source = self.tracer.node([hidden, *weights], [], backward)
        return kept


def traced_decoder(model: ModelSpec, step: ForwardSpec, trained: Trained) -> TracedDecoder | None:
    """Return the decoder of a model whose layers are traced; None if they are described, or if its class cannot be."""
    if not model.config:
        return None
    if step.attention not in model.attentions:  # as where a model answers, whose attention is transformers' own
        step = replace(step, attention="eager")
    if trace := layer_trace(model, traced_pass(step, trained)):
        return TracedDecoder(model, step, trained, trace)
    if fault := fault_of_sizes(model):
        raise UserError(
            f"the memory of a {model.family} is unknown: its class cannot be traced ({fault_of_tracing(model)}), and "
            f"{fault}; estimate a model of another architecture"
        )
    return None


def traced_pass(step: ForwardSpec, trained: Trained) -> TracedPass:
    """Return the settings of a pass that its layers depend on."""
    method = trained.method
    assert method is None or isinstance(method, Method)
    return TracedPass(
        method,
        trained.ranks,
        step.attention,
        step.width,
        step.weight_width or step.width,
        trained.width or step.width,
        step.on_cpu,
    )


class Input(Parameter):
    """The input of a recomputed layer, whose gradient goes to the layer before."""

    __slots__ = ("gradient",)

    def __init__(self, tracer: MemoryTracer, count: float, width: float) -> None:
        super().__init__(tracer, count, width, 0)
        self.gradient: Value | None = None

    def accumulate(self, gradient: Value) -> None:
        """Record the gradient."""
        self.gradient = gradient
