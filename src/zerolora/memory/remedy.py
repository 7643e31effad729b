"""What would make a training fit that does not."""

from dataclasses import replace
from typing import Any

from zerolora.memory.estimate import (
    Capacity,
    fault_of,
    impossible,
    settings_changes,
    strategy_changes,
    too_large,
)
from zerolora.memory.headroom import asked
from zerolora.memory.predict import predict
from zerolora.memory.search import max_sequence_length, of_length
from zerolora.memory.training_spec import TrainingSpec
from zerolora.model.spec import ModelSpec
from zerolora.units import gib

MOST_NODES = 64


def nearest(entries: list[dict[str, Any]], faults: list[str | None], capacity: Capacity) -> int:
    """Return the index of the entry that needs least of what is too small, of those that can run if any can.

    `faults` are the reasons why entries cannot run at all, None for those that can.
    """

    def share(index: int) -> float:
        gpu, host = entries[index]["gpu"]["total"], asked(entries[index]["host"]["total"]) / capacity.host
        return max(host, gpu / capacity.gpu) if capacity.gpu else host

    return min([index for index, fault in enumerate(faults) if not fault] or range(len(entries)), key=share)


def remedy(model: ModelSpec, spec: TrainingSpec, capacity: Capacity) -> str:
    """Return what would make a spec fit that does not: one change, all together, shorter rows or more nodes."""

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
    return f"{gib(prediction.gpu['total'])} of a GPU, {gib(asked(prediction.host['total']))} of a host"
