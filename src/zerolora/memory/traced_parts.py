"""What the parts of a model allocate in a pass, such as a layer of each kind, for rows of any size."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from zerolora.methods.method import Method
from zerolora.types import Attention

LENGTHS = (256, 512, 1024)
"""Tokens of a row in the passes that are traced (`least`, TracedPart)."""
WORK = ("flops", "scores", "moved", "operations")
"""Measures of a forward pass, each also of the backward pass."""
COUNTS = ("operations", "operations_backward", "mixing")
"""Measures that are numbers of operations: some more for long rows, none for the square of tokens."""
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


def least(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the rows and their tokens in the passes that are always traced."""
    return [*((1, each) for each in lengths), (2, lengths[0]), (3, lengths[0])]


@dataclass(frozen=True)
class TracedPart:
    """Bytes of a part of a model, such as a layer of a kind: in one and in two rows of each length, in three of the
    first, and with a `step` in one of a token more."""

    lengths: tuple[int, ...]
    """LENGTHS or SHORT_LENGTHS, or multiples."""
    step: int
    """What the class pads the tokens of a row to a multiple of, as those do that divide rows into chunks; else 1."""
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
    returned: tuple[int, ...]
    """Of what a layer returns beside its result, such as the weights of attention, that has a gradient."""
    inputs: tuple[int, ...]
    """Of linear modules, where nothing saves them."""
    flops: tuple[int, ...]
    """Floating-point operations of matrix products in the forward pass."""
    scores: tuple[int, ...]
    """The same of attention's fused kernel, over all pairs of tokens."""
    moved: tuple[int, ...]
    """Bytes that all other operations read and write."""
    operations: tuple[int, ...]
    mixing: tuple[int, ...]
    """Of the operations, those of the layer's modules that mix tokens by convolutions, sums over tokens or chunks."""
    flops_backward: tuple[int, ...]
    scores_backward: tuple[int, ...]
    moved_backward: tuple[int, ...]
    operations_backward: tuple[int, ...]

    @classmethod
    def of(cls, lengths: tuple[int, ...], step: int, measured: dict[tuple[int, int], dict[str, int]]) -> "TracedPart":
        """Return a part from its measures in passes of rows and their tokens. Without those of two longer rows, these
        take what one does and what another adds to the first length."""
        values: dict[str, tuple[int, ...]] = {}
        for name in MEASURES:
            here = {size: each[name] for size, each in measured.items()}
            constant = 2 * here[1, lengths[0]] - here[2, lengths[0]]
            two = [here.get((2, each), 2 * here[1, each] - constant) for each in lengths]
            more = [here[1, lengths[0] + 1]] if step > 1 else []
            values[name] = (*(here[1, each] for each in lengths), *two, here[3, lengths[0]], *more)
        return cls(lengths, step, **values)

    def at(self, name: str, rows: int, length: int, packed: float = 1.0) -> float:
        """Return one of the measures for `rows` packed rows of `length` tokens, each of `packed` rows.

        In a row, a storage has a constant size, or grows with its tokens or with their square. A single row may be
        computed otherwise than several, of which torch copies what it reads of one as it is; the bytes of several are
        a + rows (b + c length + d length²). What padding adds grows with the tokens that are added: to each row of a
        packed row, since training computes modules that mix tokens row by row (train/mixing_modules.py). The mean of
        rows of many lengths is half a step, of rows shorter than that what they lack.
        """
        values = getattr(self, name)
        between = self._along if name in COUNTS else self._between
        count = len(self.lengths)
        one, two = values[:count], values[count : 2 * count]
        if rows == 1:
            result = between(one, length)
        else:
            constant = 3 * two[0] - 2 * values[2 * count]
            result = constant + rows * between([(each - constant) / 2 for each in two], length)
        if self.step > 1:
            next_ = self.lengths[0] + 1
            added = max(0.0, values[-1] - between(one, next_))
            padding = float(-length % self.step)
            if packed > 1:
                padding = packed * max((self.step - 1) / 2, self.step - length / packed)
            result += rows * added * padding / (-next_ % self.step)
        return result

    def calls(self, rows: int, length: int, packed: float) -> float:
        """Return how many times the operations of one pass over all rows are issued, where modules that mix tokens are
        called once for each row of a packed row."""
        usual = self.at("operations", rows, length)
        if packed <= 1 or not usual:
            return 1.0
        each = self.at("mixing", 1, max(1, round(length / packed)))
        return 1 + max(0.0, rows * packed * each - self.at("mixing", rows, length)) / usual

    def _along(self, values: Sequence[float], length: int) -> float:
        """Return the value at `length` of the lines through those of neighbouring `lengths`."""
        after = next((place for place, each in enumerate(self.lengths) if each >= length), len(self.lengths) - 1) or 1
        (low, high), (first, second) = self.lengths[after - 1 : after + 1], values[after - 1 : after + 1]
        return first + (second - first) * (length - low) / (high - low)

    def _between(self, values: Sequence[float], length: int) -> float:
        """Return the value at `length` of the parabola through those of `lengths`."""
        result = 0.0
        for here, value in zip(self.lengths, values, strict=True):
            factor = 1.0
            for other in self.lengths:
                if other != here:
                    factor *= (length - other) / (here - other)
            result += factor * value
        return result


MEASURES = tuple(field.name for field in fields(TracedPart) if field.name not in ("lengths", "step"))


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
