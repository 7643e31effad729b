"""What a forward pass leaves behind for the backward pass: layer activations and logits."""

from zerolora.memory.shapes import Shape
from zerolora.memory.states import BYTES


def layer_activations(shape: Shape, rows: int, length: int, precision: str, checkpointing: bool) -> float:
    """Return the bytes of all layers' activations for `rows` rows of `length` tokens.

    34·s·b·h per layer in 16 bits (arXiv 2205.05198, eq. 1, without the 5·a·s²·b term: attention by sdpa keeps
    no score matrix), in proportion for fp32. With checkpointing 2·s·b·h per layer and one layer in full (section 5).
    """
    width = BYTES[precision] / 2
    one_input = 2 * length * rows * shape.hidden * width
    one_layer = 34 * length * rows * shape.hidden * width
    return shape.layers * one_input + one_layer if checkpointing else shape.layers * one_layer


def logits(shape: Shape, rows: int, length: int, precision: str) -> float:
    """Return the bytes of the logits and their loss: in the model's precision, an fp32 copy, its fp32 gradient.

    An upper bound: `length` counts every token, and training makes logits for the answers only.
    """
    return rows * length * shape.vocabulary * (BYTES[precision] + 4 + 4)
