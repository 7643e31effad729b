"""The largest micro-batch, and the longest row, with which a training fits."""

from collections.abc import Callable
from dataclasses import replace

from zerolora.memory.estimate import Capacity, fault_of
from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.spec import ModelSpec

MOST = 2**31 - 1
"""Of rows and of tokens; a search ends there."""


def largest(fits: Callable[[int], bool]) -> int:
    """Return a number that `fits` while the next one does not: the largest one if fewer always fit where more do.

    Returns 0 if 1 does not fit, and MOST if that does. Doubles until a number does not fit, then bisects.
    """
    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def max_micro_batch(model: ModelSpec, spec: TrainingSpec, capacity: Capacity) -> int:
    """Return the largest micro-batch that fits, 0 if none does."""
    return largest(lambda rows: fault_of(model, replace(spec, micro_batch=rows), capacity) is None)


def max_sequence_length(model: ModelSpec, spec: TrainingSpec, capacity: Capacity) -> int:
    """Return the largest number of tokens of a row that fits, 0 if none does."""
    return largest(lambda length: fault_of(model, of_length(spec, length), capacity) is None)


def of_length(spec: TrainingSpec, length: int) -> TrainingSpec:
    """Return a spec whose rows have `length` tokens."""
    return replace(spec, length=length, logits=min(spec.logits, length))
