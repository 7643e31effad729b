"""Predicts the bytes of one configuration, term by term, on each GPU, each host and the disk.

Model states (states.py) and the engines' allocations (gpu.py, host.py) are added to the traced step (decoder.py), each
with its source.
"""

import functools
from dataclasses import dataclass
from typing import Any

from zerolora.errors import UserError
from zerolora.memory import gpu, host, reserve
from zerolora.memory.decoder import traced_decoder
from zerolora.memory.states import model_states
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.method import Method
from zerolora.model.spec import ModelSpec, Module
from zerolora.model.tracer import NothingTrained
from zerolora.strategies.strategy import Buckets, LayerWork, ModelSizes


@dataclass(frozen=True)
class Prediction:
    """Bytes by term. `gpu` and `host` have the terms and total of the phase `peak_phase`."""

    gpu: dict[str, Any]
    host: dict[str, Any]
    disk: dict[str, int]
    phases: dict[str, int]
    """Bytes on the GPU in each phase, reserve included."""
    offloaded: int
    """Bytes of one rank that offload keeps on the host."""
    offloaded_step: int
    """Bytes of one rank that an optimizer on the host allocates and frees in a step."""
    buckets: Buckets


def predict(model: ModelSpec, spec: TrainingSpec) -> Prediction:
    """Predict the bytes of training a model.

    Raises UserError if a module to train is not in the model, or if no traced module is trained.
    """
    run = _planned(model, spec)
    try:
        step = gpu.traced(run)
    except NothingTrained:
        names = ", ".join(sorted({path.rpartition(".")[2] for path, _ in run.parameters.ranks})) or "nothing"
        raise UserError(
            f"{spec.method.name} adapts {names}, none of which is in the attention or the MLP that is traced for a "
            f"{model.family}; adapt modules there, or estimate a model of another architecture"
        ) from None
    phases = gpu.by_phase(run, step)
    totals = {name: int(values["total"]) for name, values in phases.items()}
    whole = {name: each + reserve.shares(spec, each, phases[name]["idle"])["total"] for name, each in totals.items()}
    peak = max(whole, key=lambda name: whole[name])
    return Prediction(
        gpu.terms(run, phases[peak], peak),
        host.terms(run, step, totals),
        host.disk_terms(run),
        whole,
        int(host.offloaded(run)),
        int(host.stepping(run)),
        run.buckets,
    )


def sized(model: ModelSpec, spec: TrainingSpec) -> Buckets:
    """Return the bucket sizes that render would write for a model."""
    sizes = ModelSizes(
        model.hidden, spec.parameters(model).trained, *_stored_sizes(model, spec.prepared_method, spec.width)
    )
    return spec.layout.buckets(sizes, not spec.on_cpu)


@functools.lru_cache(maxsize=64)
def _stored_sizes(model: ModelSpec, method: Method, width: int) -> tuple[int, int, int]:
    """Return the elements of the largest layer, of the largest module and of the base model, as DeepSpeed counts them:
    of a 4-bit weight those of the tensor that is sharded (partition_parameters.py, ds_numel)."""

    def stored(module: Module) -> float:
        return method.packed(module, width)

    largest = max(map(stored, model.modules))
    everything = sum(stored(module) * module.count for module in model.modules)
    return round(model.largest_layer(stored)), round(largest), round(everything)


def layer_work(model: ModelSpec, spec: TrainingSpec) -> LayerWork | None:
    """Return the work of a model's layers in a micro-step, if they are traced from its class; None if the cost model
    has it, or if its class cannot be traced.

    Raises UserError if a module to train is not in the model.
    """
    decoder = traced_decoder(model, *gpu.pass_of(_planned(model, spec)))
    return decoder.work() if decoder else None


def disk(model: ModelSpec, spec: TrainingSpec) -> dict[str, int]:
    """Predict the terms of the disk space of training a model, in bytes, without tracing its step.

    Raises UserError if a module to train is not in the model.
    """
    return host.disk_terms(_planned(model, spec))


def _planned(model: ModelSpec, spec: TrainingSpec) -> gpu.PlannedRun:
    parameters = spec.parameters(model)
    elements, others = model.buffers
    buffers = elements * spec.width + others
    states = model_states(
        parameters.frozen_bytes + buffers,
        parameters.trained,
        spec.layout,
        spec.ranks,
        spec.ranks_per_node,
        spec.precision,
        spec.optimizer.state_bytes(parameters) / parameters.trained,
        parameters.constants + buffers,
        spec.accumulation > 1,
    )
    return gpu.PlannedRun(model, spec, parameters, states, spec.buckets or sized(model, spec))
