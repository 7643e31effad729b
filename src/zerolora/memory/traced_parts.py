"""What the parts of a model allocate in a pass, such as a layer of each kind, for rows of any size."""

from dataclasses import dataclass, fields

from zerolora.methods.method import Method
from zerolora.types import Attention

LENGTHS = (256, 512, 1024)
"""Tokens of a row in the passes that are traced; of two rows the first."""
WORK = ("flops", "scores", "moved", "operations")
"""Measures of a forward pass, each also of the backward pass."""
BACKWARD = "_backward"
SHORT_LENGTHS = (16, 32, 64)
"""The same for a class that computes token by token, for which long rows would take minutes."""


@dataclass(frozen=True)
class TracedPass:
    """The settings of a pass that its layers depend on."""

    method: Method | None
    """None for a pass without gradients of the base model."""
    ranks: tuple[tuple[str, int], ...]
    attention: Attention
    width: int
    """Bytes of an activation."""
    weight_width: int
    """Bytes of an element in which quantized modules compute."""
    trained_width: int
    """Bytes of an element of a trained weight."""
    on_cpu: bool


@dataclass(frozen=True)
class TracedPart:
    """Bytes of a part of a model, such as a layer of a kind, in one row of each length, and in two of the first."""

    lengths: tuple[int, ...]
    """LENGTHS or SHORT_LENGTHS."""
    alone: tuple[int, ...]
    """The most that a forward pass without gradients allocates."""
    forward: tuple[int, ...]
    """The most that a forward pass allocates for a backward pass."""
    kept: tuple[int, ...]
    """What remains after it, its result included."""
    backward: tuple[int, ...]
    """The most that the backward pass allocates, without gradients of weights after they are complete."""
    with_gradients: tuple[int, ...]
    """The same with these."""
    gradients: tuple[int, ...]
    """Of its weights."""
    input: tuple[int, ...]
    """Of its input, where nothing saves it: a recomputation holds it. Before the layers: of its result."""
    loose: tuple[int, ...]
    """Before the layers: of the rest, such as masks, where nothing saves it; checkpoints hold it."""
    inputs: tuple[int, ...]
    """Of linear modules, where nothing saves them."""
    flops: tuple[int, ...]
    """Floating-point operations of matrix products in the forward pass."""
    scores: tuple[int, ...]
    """The same of attention's fused kernel, over all pairs of tokens."""
    moved: tuple[int, ...]
    """Bytes that all other operations read and write."""
    operations: tuple[int, ...]
    flops_backward: tuple[int, ...]
    scores_backward: tuple[int, ...]
    moved_backward: tuple[int, ...]
    operations_backward: tuple[int, ...]

    def at(self, name: str, rows: int, length: int) -> float:
        """Return one of the measures for `rows` rows of `length` tokens.

        A storage has a constant size, or grows with the rows, and in a row not at all, with its tokens or with their
        square: a + rows (b + c length + d length²).
        """
        first, second, third, doubled = getattr(self, name)
        constant = 2 * first - doubled
        points = [(at, value - constant) for at, value in zip(self.lengths, (first, second, third), strict=True)]
        of_a_row = 0.0
        for here, value in points:
            factor = 1.0
            for other, _ in points:
                if other != here:
                    factor *= (length - other) / (here - other)
            of_a_row += factor * value
        return float(constant + rows * of_a_row)


MEASURES = tuple(field.name for field in fields(TracedPart) if field.name != "lengths")


@dataclass(frozen=True)
class LayerTrace:
    """The parts of a model."""

    order: tuple[int, ...]
    """The kind of each layer."""
    hidden: int
    """Bytes of the hidden states that a layer passes on, of a token."""
    before: TracedPart
    """What comes before the layers: embedding, tables, masks."""
    first: TracedPart
    """The first layer, with an input that needs no gradient."""
    layers: tuple[TracedPart, ...]
    """One layer of each kind, with an input that does."""
    after: TracedPart
    """What comes after them: the last norm."""
