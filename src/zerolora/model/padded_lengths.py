"""The lengths of batches with train.compile: few, since torch compiles a layer for each."""

LENGTHS = 4
"""Lengths of all batches of a run."""
LEAST_STEP = 8
"""Tokens that a difference of two lengths is a multiple of."""


def step_of(longest: int) -> int:
    """Return the difference of two neighbouring lengths, if `longest` is the length of the longest packed row."""
    return LEAST_STEP * -(-longest // (LENGTHS * LEAST_STEP))


def padded(length: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `length`."""
    return -(-length // step) * step
