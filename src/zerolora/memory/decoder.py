"""One training step of a decoder on the memory tracer: embedding, layers, loss, backward.

Variables have the same lifetime as in the model code, since lifetimes decide the peak. Layers are in layer.py, their
linear modules in projections.py. Sources: transformers/models/*/modeling_*.py, loss/loss_utils.py;
torch/utils/checkpoint.py.
"""

import functools
from collections.abc import Callable

from zerolora.logit_chunks import chunk_size
from zerolora.memory.layer import Layer
from zerolora.memory.model_spec import ModelSpec
from zerolora.memory.projections import ForwardSpec, Trained
from zerolora.memory.tracer import MemoryTracer, Node, Parameter, Value

Phases = dict[str, dict[str, int]]


@functools.lru_cache(maxsize=1024)
def phases(model: ModelSpec, step: ForwardSpec, trained: Trained) -> Phases:
    """Return the peak bytes of forward, loss and backward, by kind and in total.

    Models of two and three layers are traced; every layer adds the same bytes, so the others are extrapolated linearly.
    Backward has two phases: its beginning, with all activations saved, and its end, with all gradients. The entry
    "small_blocks" is not a phase, but the peak of the blocks that a heap serves (tracer.py, SMALL).
    """
    # In an encoder-decoder, an encoder layer counts as one layer, and the cross-attention of a decoder layer as half.
    layers = model.layers + model.encoder_layers + (model.layers // 2 if model.encoder_layers else 0)
    if layers <= 3:
        return Decoder(model, layers, step, trained).run()
    two, three = (Decoder(model, layers, step, trained).run() for layers in (2, 3))
    return {
        phase: {kind: value + (layers - 3) * (value - two[phase].get(kind, 0)) for kind, value in kinds.items()}
        for phase, kinds in three.items()
    }


@functools.lru_cache(maxsize=1024)
def evaluation(model: ModelSpec, step: ForwardSpec, trained: Trained) -> int:
    """Return the peak bytes of a forward pass that saves nothing for a backward pass."""
    return Decoder(model, min(model.layers, 2), step, trained).evaluate()


class Decoder(Layer):
    """A decoder of `layers` layers, and what is trained."""

    def __init__(self, model: ModelSpec, layers: int, step: ForwardSpec, trained: Trained) -> None:
        super().__init__(model, step, trained)
        self.layers = layers
        self.embedded = self.trained_weight(model.vocabulary * model.hidden)
        self.leaf: Value | None = None
        self.reached: Callable[[str], None] = lambda phase: None

    def run(self) -> Phases:
        """Run one step and return the peak of each phase."""
        tracer, step = self.tracer, self.step
        found: Phases = {}

        def noted(phase: str) -> None:
            found[phase] = {**tracer.at_peak, "total": tracer.peak}
            tracer.restart()

        ids = [tracer.new(self.tokens, 8) for _ in range(3)]  # input_ids, labels, position_ids
        tables = [tracer.new(self.tokens * self.model.head_dim, step.width) for _ in range(2 * bool(self.model.rotary))]
        mask = tracer.new(step.rows * step.length**2, 1) if step.masked and step.attention != "flash" else None
        if mask and step.attention == "eager":
            mask = tracer.new(step.rows * step.length**2, step.width)
        hidden = [self.body(mask)]
        noted("forward")
        tracer.kind = "logits"
        loss, held = self.head(hidden.pop())
        noted("loss")
        self.reached = noted
        tracer.backward(loss, tracer.new(1, 4))
        noted("backward_end" if "backward" in found else "backward")
        found["small_blocks"] = {"total": tracer.small_peak}
        del ids, tables, mask, held
        return found

    def evaluate(self) -> int:
        """Run a forward pass without gradients and return its peak bytes."""
        self.tracer.recording = False
        step = self.step
        mask = self.tracer.new(step.rows * step.length**2, 1) if step.masked and step.attention != "flash" else None
        loss, held = self.head(self.body(mask))
        del mask, loss, held
        return self.tracer.peak

    def body(self, mask: Value | None) -> Value:
        """Embedding, layers and the last norm."""
        hidden = self.embedding()
        for number in range(self.layers):
            hidden = self.marked(hidden, number)
            hidden = self.checkpointed(hidden, mask) if self.step.checkpointing else self.layer(hidden, mask)
        return self.norm(hidden)

    def embedding(self) -> Value:
        """The embedded tokens. They need a gradient if the embedding is trained, or for checkpointing."""
        new, model = self.tracer.new, self.model
        hidden = new(self.tokens * model.hidden, self.step.width)
        if self.trained.trains_base:
            hidden.source = self.tracer.node(
                [self.of(self.embedded)], [], lambda gradient: [new(model.vocabulary * model.hidden, self.step.width)]
            )
        elif self.step.checkpointing:
            hidden.source = Parameter(self.tracer, hidden.count, hidden.width, 0)
            self.leaf = hidden  # the graph holds the tensor that gets the gradient
        if model.scaled_embedding:
            hidden = self.unary(hidden)
        return self.dropped(hidden) if model.hidden_dropout else hidden

    def marked(self, hidden: Value, number: int) -> Value:
        """Return a view of a layer's input whose backward pass ends a phase.

        Most activations are live when the backward pass reaches the last layer, most gradients at the first.
        """
        result = self.view(hidden)
        node = result.source
        if isinstance(node, Node):

            def passing(gradient: Value) -> list[Value]:
                if number == self.layers - 1 > 0:
                    self.reached("backward")
                if number == 1:
                    self.tracer.restart()
                return [gradient]

            node.backward = passing
        return result

    def checkpointed(self, hidden: Value, mask: Value | None) -> Value:
        """A layer that is recomputed in the backward pass (torch.utils.checkpoint, reentrant)."""
        tracer = self.tracer
        tracer.recording = False
        result = self.layer(hidden, mask)
        tracer.recording = True
        # The node saves its input, and nothing else.
        count, width = hidden.count, hidden.width

        saved = [hidden.storage]

        def backward(gradient: Value) -> list[Value]:
            kind, tracer.kind = tracer.kind, "activations"
            leaf = Input(tracer, count, width)
            storage = saved.pop()  # freed when this function returns
            again = self.layer(Value(storage, count, width, leaf), mask)
            tracer.backward(again, gradient)
            tracer.kind = kind
            assert leaf.gradient
            return [leaf.gradient]

        result.source = tracer.node([hidden], [hidden], backward)
        return result

    def head(self, hidden: Value) -> tuple[Value, Value | None]:
        """Return the loss, and the logits if the loop holds them."""
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
        """The hidden states of some positions (index_select); its gradient is as large as the whole."""
        new, count, width = self.tracer.new, hidden.count, hidden.width
        result = new(positions * self.model.hidden, width)
        result.source = self.tracer.node([hidden], [], lambda gradient: [new(count, width)])
        return result

    def fused_loss(self, hidden: Value) -> Value:
        """Loss and gradient, one chunk of tokens at a time, both in the forward pass (train/loss.py)."""
        model, width, new = self.model, self.step.width, self.tracer.new
        tokens = hidden.count / model.hidden
        gradient = new(hidden.count, width) if hidden.needs_gradient else None
        size = min(tokens, chunk_size(tokens, model.hidden, model.vocabulary))
        logits = new(size * model.vocabulary, width)
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
        loss.source = self.tracer.node([hidden], [gradient] if gradient else [], lambda _: [new(count, width)])
        return loss

    def cross_entropy(self, logits: Value) -> Value:
        """log_softmax in fp32, whose result is saved; the backward pass allocates two more of its size."""
        new, count = self.tracer.new, logits.count
        in_fp32 = self.cast(logits, 4)
        del logits
        log_softmax = new(count, 4)

        def through_softmax(gradient: Value) -> list[Value]:
            return [new(count, 4)]

        log_softmax.source = self.tracer.node([in_fp32], [log_softmax], through_softmax)
        loss = new(1, 4)
        loss.source = self.tracer.node([log_softmax], [], lambda gradient: [new(count, 4)])
        return loss


class Input(Parameter):
    """The input of a recomputed layer; its gradient is passed to the layer before."""

    __slots__ = ("gradient",)

    def __init__(self, tracer: MemoryTracer, count: float, width: float) -> None:
        super().__init__(tracer, count, width, 0)
        self.gradient: Value | None = None

    def accumulate(self, gradient: Value) -> None:
        """Take a gradient."""
        self.gradient = gradient
