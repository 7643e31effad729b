"""The largest micro-batch and the longest row that fit, and changes with which a training fits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zerolora.memory.estimate import Capacity, fault_of, impossible, settings_changes, strategy_changes, too_large
from zerolora.memory.predict import predict
from zerolora.memory.reserve import with_headroom
from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.spec import ModelSpec
from zerolora.units import gib

MOST = 2**31 - 1
"""Maximum rows and tokens of a search."""
MOST_NODES = 64


def largest(fits: Callable[[int], bool]) -> int:
    """Return a number from 0 to MOST that `fits` while the next one does not: the largest one if `fits` is monotonic.

    Doubles until a number does not fit, then bisects.
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
    """Return the largest micro-batch that fits; 0 if none does."""
    return largest(lambda rows: fault_of(model, replace(spec, micro_batch=rows), capacity) is None)


def max_sequence_length(model: ModelSpec, spec: TrainingSpec, capacity: Capacity) -> int:
    """Return the length of the longest row that fits; 0 if none does."""
    return largest(lambda length: fault_of(model, of_length(spec, length), capacity) is None)


def of_length(spec: TrainingSpec, length: int) -> TrainingSpec:
    """Return a spec whose rows have `length` tokens."""
    return replace(spec, length=length, logits=min(spec.logits, length))


def nearest(entries: list[dict[str, Any]], faults: list[str | None], capacity: Capacity) -> int:
    """Return the index of the entry nearest to fitting, among those without a fault if there are any.

    `faults` are the reasons why entries cannot run on any capacity, None for those that can.
    """

    def share(index: int) -> float:
        gpu, host = entries[index]["gpu"]["total"], with_headroom(entries[index]["host"]["needed"]) / capacity.host
        return max(host, gpu / capacity.gpu) if capacity.gpu else host

    return min([index for index, fault in enumerate(faults) if not fault] or range(len(entries)), key=share)


def remedy(model: ModelSpec, spec: TrainingSpec, capacity: Capacity) -> str:
    """Return changes with which a spec fits: one of them, all together, shorter rows or more nodes."""

    def fits(other: TrainingSpec) -> bool:
        return fault_of(model, other, capacity) is None

    if fault := impossible(spec, model):
        return f"it cannot run here: {fault}"
    changes = settings_changes(model, spec)
    for name, other in [*changes, *strategy_changes(spec)]:
        if fits(other):
            return f"with {name} it fits: {_needed(model, other)}"
    lowest, names = spec, [name for name, _ in changes]
    while left := settings_changes(model, lowest):
        lowest = left[0][1]
    together = f"with {' and '.join(filter(None, [', '.join(names[:-1]), *names[-1:]]))} " if names else ""
    if names and fits(lowest):
        return f"{together}it fits: {_needed(model, lowest)}"
    if length := max_sequence_length(model, lowest, capacity):
        return f"{together}rows of up to {length:,} tokens fit: {_needed(model, of_length(lowest, length))}"
    nodes = 2 * spec.nodes
    while nodes <= MOST_NODES:
        more = replace(lowest, nodes=nodes)
        if fits(more):
            return f"{together}it fits on {nodes} nodes: {_needed(model, more)}"
        nodes *= 2
    return f"{together}it still does not: {too_large(predict(model, lowest), capacity)}"


def _needed(model: ModelSpec, spec: TrainingSpec) -> str:
    prediction = predict(model, spec)
    return f"{gib(prediction.gpu['total'])} of a GPU, {gib(with_headroom(prediction.host['needed']))} of a host"
