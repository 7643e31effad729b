"""GPU memory of one rank, phase by phase: model states, activations, logits, and the engine's buffers.

On CPU ranks the same bytes are in host memory. File names without a path are in deepspeed/runtime/zero.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerolora.memory import reserve
from zerolora.memory.decoder import Phases, evaluation, phases, pinned
from zerolora.memory.fsdp_units import REDUCED, Units, fsdp_units
from zerolora.memory.gathering import Gathered, gathered
from zerolora.memory.states import BYTES, States
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.method import TrainedParameters
from zerolora.model.projections import ForwardSpec, Trained
from zerolora.model.spec import ModelSpec
from zerolora.strategies.strategy import Buckets
from zerolora.train.objectives.objective import AddedMemory

PHASES = ("forward", "loss", "backward", "backward_end")  # of a traced step
QUANTIZED_BLOCK = 64  # weights of one constant (methods/qlora.py, BLOCK)
GATHER_LIMIT = 500_000_000  # elements that DeepSpeed's stage 0 reduces at a time (runtime/engine.py)


@dataclass(frozen=True)
class PlannedRun:
    """A model, its training spec, and values derived from both."""

    model: ModelSpec
    spec: TrainingSpec
    parameters: TrainedParameters
    states: States
    buckets: Buckets

    @property
    def quantizes_whole(self) -> bool:
        """Whether each rank quantizes the whole base model before it keeps its shard (train/base_model.py)."""
        return self.spec.method.reads_whole and self.spec.layout.stage == 3

    @property
    def gradient_width(self) -> int:
        """Bytes of a number where gradients of micro-batches are added (memory/states.py)."""
        return BYTES["fp32"] if self.spec.accumulation > 1 else self.spec.width

    @property
    def packed(self) -> float:
        """The frozen weights as a number of weights of the run's precision, without constants."""
        return self.parameters.frozen - self.spec.saved_by_packing(self.model)

    @property
    def added(self) -> AddedMemory:
        """Bytes that the objective adds."""
        return self.spec.added_by_objective(self.parameters.trained)

    @property
    def deepspeed_stage(self) -> int | None:
        """DeepSpeed's ZeRO stage; None for another engine."""
        return self.spec.layout.stage if self.spec.layout.engine == "deepspeed" else None


@dataclass(frozen=True)
class TracedStep:
    """Results of the memory tracer, in bytes of one rank."""

    phases: Phases
    """Forward, loss and both ends of backward, by kind."""
    evaluation: int
    """The peak of a forward pass without gradients."""
    small_blocks: int
    """The peak of the blocks in a CPU rank's heap (tracer.py, SMALL)."""
    modules: dict[str, int]
    """The peak of the last layer's forward pass from each module to the next, by path."""
    kept: int
    """Bytes that all layers keep for the backward pass."""
    offloaded: int
    """Bytes that all layers keep for it on the host."""


def traced(run: PlannedRun) -> TracedStep:
    """Trace a step and a forward pass without gradients."""
    step, trained = pass_of(run)
    kinds = phases(run.model, step, trained)
    return TracedStep(
        {name: values for name, values in kinds.items() if name in PHASES},
        evaluation(run.model, replace(step, checkpointing=False), trained),
        kinds["small_blocks"]["total"],
        kinds["modules"],
        kinds["kept"]["total"],
        kinds["offloaded"]["total"],
    )


def pass_of(run: PlannedRun) -> tuple[ForwardSpec, Trained]:
    """Return a micro-batch of a rank, and what is trained."""
    spec, layout = run.spec, run.spec.layout
    method = spec.prepared_method
    step = ForwardSpec(
        spec.micro_batch,
        spec.own_length,
        method.activation_width(spec.width),
        spec.attention,
        spec.masked,
        spec.activation_checkpointing,
        spec.loss,
        min(spec.logits, spec.own_length),  # all supervised tokens of a row may be on one rank
        run.deepspeed_stage == 3,
        spec.sequence_parallel > 1,
        spec.on_cpu,
        spec.width,
        spec.precision == "fp16" and method.activation_width(spec.width) == spec.width,
        spec.capability,
        spec.sequence_parallel,
        spec.offloads_inputs,
        spec.kernels,
        spec.packed,
    )
    # DDP keeps trained weights in fp32 and computes with copies (train/engines/ddp.py, _compute_in), unless peft has
    # lifted activations to fp32.
    width, kept = spec.width, 0
    if layout.engine == "ddp":
        width, kept = step.width, BYTES["fp32"]
    # From stage 2 on a rank keeps its shard of each gradient. Offloaded gradients leave the GPU; stage 3 allocates
    # gradients with the states.
    share = 1 / spec.ranks if layout.stage >= 2 else 1.0
    if layout.optimizer != "gpu" or run.deepspeed_stage == 3:
        share = 0.0
    return step, Trained(method, run.parameters.ranks, width, share, _gradient_buckets(run), kept)


def by_phase(run: PlannedRun, step: TracedStep) -> dict[str, dict[str, float]]:
    """Return the bytes of each phase by term and in total, without the reserve.

    Gradients are a term of their own; "total" also includes the other model states.
    """
    spec, states, parameters = run.spec, run.states, run.parameters
    static = states.total - states.gradients
    # Gradients are live from the second micro-step on; stage 3 allocates them at the start (stage3.py,
    # grad_partitions_flat_buffer).
    allocated = states.gradients if run.deepspeed_stage == 3 else 0.0
    kept = states.gradients if spec.accumulation > 1 else allocated
    held, gathers = _resident(run) + run.added.states, _gathered(run, step)
    loaded = states.trained_weights + states.frozen_weights + states.constants
    if run.quantizes_whole:
        loaded = states.trained_weights + parameters.frozen_bytes
    elif spec.method.frozen_type is not None and spec.layout.stage == 3:
        loaded += quantizing(run)
    result: dict[str, dict[str, float]] = {"loading": {"total": loaded}}
    for name, kinds in step.phases.items():
        extra = _reducing(run) if name == "backward_end" else 0.0
        of_loss = run.added.activations if name in ("loss", "backward") else 0.0
        of_loss += run.added.batch
        of_loss += spec.chunk_of_objective(run.model) if name == "loss" else 0.0
        coming = _coming_back(run, step) if name == "backward" else 0.0
        result[name] = {
            "activations": kinds.get("activations", 0) + of_loss + coming,
            "logits": kinds.get("logits", 0),
            "gradients": max(kept, kinds.get("gradients", 0)),
            "buffers": held + gathers[name] + extra + kinds.get("buffers", 0),
        }
    if run.deepspeed_stage == 1 and spec.layout.optimizer == "gpu":
        # All gradients, a bucket of them, and a copy of this rank's partition (stage_1_and_2.py,
        # copy_grads_in_partition).
        copied = spec.width * (parameters.trained / spec.ranks + run.buckets.reduce)
        gradients = float(parameters.trained * spec.width)  # of all micro-batches, rounded
        result["reducing"] = _phase(gradients=gradients, buffers=held + copied)
    # transformers' loss returns the logits, which live until the end of the step.
    width = spec.prepared_method.activation_width(spec.width)
    logits = spec.micro_batch * spec.own_length * run.model.vocabulary * width if spec.loss == "full" else 0.0
    # At stages 0 and 1 the sums in fp32 are gone by then, and at stage 1 the gradients of other ranks' partitions.
    own = states.gradients
    if run.deepspeed_stage in (0, 1):
        own = parameters.trained * spec.width / (spec.ranks if spec.layout.stage else 1)
    if spec.layout.optimizer != "gpu":
        own = 0.0
    result["optimizer"] = _phase(logits=logits, gradients=own, buffers=held + _stepping(run))
    buffers = held + gathers["evaluation"]
    result["evaluation"] = _phase(activations=step.evaluation, gradients=allocated, buffers=buffers)
    # Sharded parameters are gathered tensor by tensor, in fp32 (train/engines/engine.py, part).
    tensor = BYTES["fp32"] * parameters.largest_trained if spec.ranks > 1 else 0.0
    if spec.layout.optimizer == "gpu":
        tensor += spec.optimizer.unpacked_bytes(parameters.trained / (spec.ranks if spec.layout.stage else 1))
    result["saving"] = _phase(gradients=allocated, buffers=held + tensor)
    idle = idle_bytes(run, gathers)
    for name, values in result.items():
        if name != "loading":
            values["total"] = static + sum(values.values())
        values["idle"] = 0.0 if name == "loading" else idle.get(name, idle["other"])
    return result


def idle_bytes(run: PlannedRun, gathers: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes of the gathering stream's memory that are unused at the peak of each traced phase and of
    evaluation, and in "other" phases.

    DeepSpeed gathers weights, and FSDP fills its all-gather buffers, on a stream of their own
    (partitioned_param_coordinator.py, __allgather_stream; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
    all_gather_copy_in_stream). torch's allocator keeps the freed blocks of a stream for that stream
    (c10/cuda/CUDACachingAllocator.cpp, BlockComparatorSize), so its part of the memory stays at its own peak.
    """
    spec, layout = run.spec, run.spec.layout
    if layout.stage < 3 or spec.on_cpu or spec.ranks == 1:
        return {"other": 0.0}
    if layout.engine == "fsdp":
        units = _units(run)[0]
        most = units.buffers() * spec.width
        used = dict.fromkeys((*PHASES, "evaluation"), max(units.layers, default=0.0) * spec.width)
    else:
        held = _held(run)
        forward = spec.width * max((size for _, _, size in held.forward), default=0)
        used = {**gathers, "forward": float(forward)}
        most = max(used.values(), default=0.0)
    return {"other": most} | {name: max(0.0, most - value) for name, value in used.items()}


def terms(run: PlannedRun, at_peak: dict[str, float], peak: str) -> dict[str, Any]:
    """Return the GPU's terms, which add up to the total of the phase `peak`; none is negative.

    At a peak before all gradients exist, their memory is in other use: first `activations`, then `logits`, then
    `buffers` are reduced by it.
    """
    states = run.states
    shares = reserve.shares(run.spec, int(at_peak["total"]), at_peak["idle"])
    named = {
        "frozen_weights": states.frozen_weights,
        **({"quantization_constants": states.constants} if states.constants else {}),
        "trained_weights": states.trained_weights,
        "gradients": states.gradients,
        "master": states.master,
        "moments": states.moments,
    }
    gpu: dict[str, Any] = {name: int(value) for name, value in named.items()}
    gpu["model_states"] = int(states.total)
    left = int(at_peak["total"]) - gpu["model_states"]
    for name in ("buffers", "logits"):
        gpu[name] = min(left, int(at_peak.get(name, 0)))
        left -= gpu[name]
    gpu["activations"] = left
    gpu |= {f"reserve_{name}": value for name, value in shares.items() if name != "total"}
    gpu["reserve"] = shares["total"]
    gpu["total"] = int(at_peak["total"]) + shares["total"]
    gpu["peak_phase"] = peak
    return gpu


def largest_module(model: ModelSpec) -> int:
    """Return the parameters of the largest module."""
    return max(module.parameters for module in model.modules)


def quantizing(run: PlannedRun) -> float:
    """Return the bytes for one weight as it is read, beside the parts of those before it (train/base_model.py).

    It is whole in the run's precision; one to be quantized also in 4 bits, with its constants twice in fp32
    (bitsandbytes/functional.py, quantize_4bit).
    """
    width, method = run.spec.width, run.spec.prepared_method
    return max(
        module.parameters * width
        if method.packed(module, width) == module.parameters
        else module.inputs * module.outputs * (width + 0.5 + 2 * 4 / QUANTIZED_BLOCK)
        for module in run.model.modules
    )


def _phase(
    activations: float = 0.0, logits: float = 0.0, gradients: float = 0.0, buffers: float = 0.0
) -> dict[str, float]:
    return {"activations": activations, "logits": logits, "gradients": gradients, "buffers": buffers}


def _resident(run: PlannedRun) -> float:
    """Return the bytes that the engine always keeps beside the model states."""
    spec, layout, parameters = run.spec, run.spec.layout, run.parameters
    if layout.engine == "ddp" and spec.ranks > 1:
        return parameters.trained * 4.0  # the reducer's buckets beside .grad (reducer.hpp)
    if run.deepspeed_stage == 3:
        # __ipg_bucket_flat_buffer (stage3.py), the output of its all-to-all.
        bucket = float(run.buckets.reduce * spec.width)
        if not layout.within_node:
            return bucket
        # hpZ's second shard of the weights (partition_parameters.py, ds_secondary_tensor)
        sharded = parameters.frozen_bytes - parameters.constants if parameters.frozen else 0.0
        return bucket + (sharded + parameters.trained * spec.width) / spec.ranks_per_node
    if run.deepspeed_stage in (1, 2) and layout.optimizer != "gpu":
        return float(parameters.largest_trained * spec.width)  # temp_grad_buffer_for_gpu_offload
    return 0.0


def _gathered(run: PlannedRun, step: TracedStep) -> dict[str, float]:
    """Return the peak bytes of gathered weights in each traced phase and in evaluation."""
    spec = run.spec
    if spec.layout.stage < 3:
        most = 0.0
    elif spec.layout.engine == "fsdp":
        return _gathered_by_fsdp(run, step)
    elif spec.on_cpu:
        # The constants fitted to CPU ranks (host.py) include weights gathered beyond the limit.
        everything = run.packed + run.parameters.trained
        most = float(min(everything, run.buckets.live) * spec.width)
    else:
        return _gathered_by_deepspeed(run, step)
    return dict.fromkeys((*step.phases, "evaluation"), most)


def _gathered_by_fsdp(run: PlannedRun, step: TracedStep) -> dict[str, float]:
    """Return the same for torch's fully_shard, with gradients before they are sharded."""
    spec, width = run.spec, run.spec.width
    units, trained = _units(run)
    alone = spec.layout.owners(spec.ranks, spec.ranks_per_node) == 1
    accumulates = spec.accumulation > 1
    whole = REDUCED * trained.total if accumulates else 0.0
    # Before a layer computes, the live activations are those that earlier layers keep.
    kept, peak = step.kept / max(1, len(units.layers)), step.phases["forward"]["total"]
    before = max(number * kept + most * width for number, most in enumerate(units.reaching(alone)))
    computing = units.computing(alone) * width
    # The head's gradient is whole from the beginning of the backward pass to its end, where the root is reduced.
    head = width * min(trained.root, run.model.vocabulary * run.model.hidden)
    backward = units.backward(trained, width, alone, accumulates) + head
    root = trained.root * (REDUCED + (REDUCED if accumulates else width))
    return {
        "forward": whole + max(computing, before - peak),
        "loss": whole + computing,
        "backward": backward,
        "backward_end": max(backward, root),
        "evaluation": computing,
    }


def _units(run: PlannedRun) -> tuple[Units, Units]:
    """Return the units that FSDP gathers, and their trained parameters."""
    method, width, parameters = run.spec.prepared_method, run.spec.width, run.parameters
    base = fsdp_units(run.model, lambda module: method.packed(module, width))
    if not parameters.ranks:
        return base, Units(max(0, parameters.trained - sum(base.layers)), base.layers)
    # An adapter that is partly outside of the layers counts as gathered with the root.
    inside = all("{}" in path for path, _ in parameters.ranks) and not method.rows
    units = base.with_adapter(*((parameters.trained, 0) if inside else (0, parameters.trained)))
    return units, Units(units.root - base.root, tuple(map(operator.sub, units.layers, base.layers)))


def _held(run: PlannedRun) -> Gathered:
    """Return the gathered weights of a step at DeepSpeed's stage 3."""
    spec = run.spec
    ranks = run.parameters.ranks if run.parameters.frozen else ()
    return gathered(
        run.model,
        ranks,
        run.buckets,
        spec.activation_checkpointing,
        spec.loss == "fused",
        spec.ranks > 1,
        spec.prepared_method,
        spec.width,
    )


def _gathered_by_deepspeed(run: PlannedRun, step: TracedStep) -> dict[str, float]:
    """Return the same for DeepSpeed's stage 3 on GPUs."""
    spec = run.spec
    if spec.ranks == 1 and spec.layout.parameters == "gpu":  # the shard is the weight (NoGatherHandle)
        return dict.fromkeys((*step.phases, "evaluation"), 0.0)
    held = _held(run)
    # The peaks of gathered weights and of activations may be at different modules of a layer.
    peak, layer = step.phases["forward"]["total"], step.kept / run.model.layers
    both = max(step.modules.get(path, peak) - later * layer + most * spec.width for path, later, most in held.forward)
    # Without logits, the layer before the last takes as much as the last.
    logits = step.phases["backward"].get("logits", 0) > step.phases["loss"].get("logits", 0) / 2
    return {
        "forward": float(max(0, both - peak)),
        "loss": float(held.loss * spec.width),
        "backward": float(max(held.backward, 0 if logits else held.before_last) * spec.width),
        "backward_end": float(max(held.before_last, held.backward_end) * spec.width),
        "evaluation": float(held.loss * spec.width),
    }


def _coming_back(run: PlannedRun, step: TracedStep) -> float:
    """Return the bytes of the layer's input that comes back from the host while the layer after it is computed
    (train/activation_offload.py, OnOwnStream)."""
    spec = run.spec
    one = spec.micro_batch * spec.own_length * run.model.hidden * spec.prepared_method.activation_width(spec.width)
    return float(one) if step.offloaded >= 2 * pinned(one) else 0.0


def _gradient_buckets(run: PlannedRun) -> float:
    """Return the bytes of the gradient buckets, allocated with the first gradient (stage_1_and_2.py, setup_buckets)."""
    if run.deepspeed_stage not in (1, 2):
        return 0.0
    return float(run.buckets.reduce * (2 if run.buckets.overlap else 1) * run.spec.width)


def _reducing(run: PlannedRun) -> float:
    """Return the bytes for reducing gradients at the end of the backward pass."""
    spec, parameters = run.spec, run.parameters
    if run.deepspeed_stage == 0 and spec.ranks > 1:
        # Gradients are concatenated until they exceed the limit (engine.py, allreduce_no_retain).
        return float(min(parameters.trained, GATHER_LIMIT + parameters.largest_trained) * spec.width)
    if run.deepspeed_stage in (1, 2) and parameters.largest_trained > run.buckets.reduce:
        # A gradient larger than the bucket gets its own (stage_1_and_2.py). For a trained tied embedding the tracer has
        # just counted more: two gradients and their sum.
        return float(parameters.largest_trained * spec.width) if parameters.frozen or not run.model.tied else 0.0
    return 0.0


def _stepping(run: PlannedRun) -> float:
    """Return the bytes that the optimizer step allocates and frees."""
    spec, layout, parameters = run.spec, run.spec.layout, run.parameters
    if layout.optimizer != "gpu":
        return 0.0
    share = parameters.trained / (1 if layout.stage == 0 else spec.ranks)
    # Under stages 1 to 3 the optimizer gets one tensor, a rank's partition.
    whole = layout.engine == "deepspeed" and layout.stage > 0
    largest = share if whole else min(share, parameters.largest_trained)
    beside = spec.optimizer.step_bytes(share, largest, spec.on_cpu)  # fp32 gradients
    if layout.engine != "deepspeed":
        return beside
    if layout.stage == 0:
        return 4.0 * share + beside  # gradients in fp32
    norm = 8.0 * min(share, parameters.largest_trained)  # of a gradient in fp64 (get_grad_norm_direct)
    if layout.stage == 3:
        return max(4.0 * share + beside, norm)  # gradients in fp32
    # Concatenated gradients, then in fp32 (stage_1_and_2.py, step).
    return spec.width * share + max(4.0 * share, beside, norm)
