"""GPU memory of one rank, phase by phase: model states, activations, logits, and the engine's buffers.

With CPU ranks the same bytes are in host memory. File names without a path are in deepspeed/runtime/zero.
"""

from dataclasses import dataclass, replace
from typing import Any

from zerolora.memory.decoder import Phases, evaluation, phases
from zerolora.memory.model_spec import ModelSpec
from zerolora.memory.projections import ForwardSpec, Trained
from zerolora.memory.states import BYTES, States
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.base import TrainedParameters
from zerolora.strategies.buckets import Buckets

GATHER_LIMIT = 500_000_000  # elements that DeepSpeed's stage 0 reduces at a time (runtime/engine.py)


@dataclass(frozen=True)
class PlannedRun:
    """A model, how it is trained, and values derived from both."""

    model: ModelSpec
    spec: TrainingSpec
    parameters: TrainedParameters
    states: States
    buckets: Buckets

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
    """The peak of blocks that a CPU rank's heap serves (tracer.py, SMALL)."""


def traced(run: PlannedRun) -> TracedStep:
    """Trace a step and a forward pass without gradients."""
    spec, layout = run.spec, run.spec.layout
    step = ForwardSpec(
        spec.micro_batch,
        spec.length,
        spec.width,
        spec.attention,
        spec.masked,
        spec.activation_checkpointing,
        spec.loss,
        spec.logits,
        run.deepspeed_stage == 3,
    )
    # DDP holds the adapter in fp32.
    width = BYTES["fp32"] if layout.engine == "ddp" else spec.width
    # From stage 2 on a rank keeps its shard of each gradient. Offloaded gradients leave the GPU; stage 3 has allocated
    # them with the states.
    share = 1 / spec.ranks if layout.stage >= 2 else 1.0
    if layout.optimizer != "gpu" or run.deepspeed_stage == 3:
        share = 0.0
    trained = Trained(spec.method, run.parameters.ranks, width, share, _gradient_buckets(run))
    kinds = phases(run.model, step, trained)
    return TracedStep(
        {name: values for name, values in kinds.items() if name != "small_blocks"},
        evaluation(run.model, replace(step, checkpointing=False), trained),
        kinds["small_blocks"]["total"],
    )


def by_phase(run: PlannedRun, step: TracedStep) -> dict[str, dict[str, float]]:
    """Return the bytes of each phase by term and in total, without the reserve.

    Gradients are a term of their own; "total" also includes the other model states.
    """
    spec, states, parameters = run.spec, run.states, run.parameters
    static = states.frozen_weights + states.trained_weights + states.master + states.moments
    # From the second micro-step on, gradients are always held; stage 3 allocates them at the start (stage3.py,
    # grad_partitions_flat_buffer).
    allocated = states.gradients if run.deepspeed_stage == 3 else 0.0
    kept = states.gradients if spec.accumulation > 1 else allocated
    held, gathered = _resident(run), _gathered(run)
    result: dict[str, dict[str, float]] = {"loading": {"total": static - states.master - states.moments}}
    for name, kinds in step.phases.items():
        extra = _reducing(run) if name == "backward_end" else 0.0
        result[name] = {
            "activations": kinds.get("activations", 0),
            "logits": kinds.get("logits", 0),
            "gradients": max(kept, kinds.get("gradients", 0)),
            "buffers": held + gathered + extra + kinds.get("buffers", 0),
        }
    if run.deepspeed_stage == 1 and spec.layout.optimizer == "gpu":
        # All gradients, a bucket of them, and a copy of those of this rank's partition (stage_1_and_2.py,
        # copy_grads_in_partition).
        copied = spec.width * (parameters.trained / spec.ranks + run.buckets.reduce)
        result["reducing"] = _phase(gradients=states.gradients, buffers=held + copied)
    # transformers' own loss returns the logits, which the loop holds until the end of the step.
    logits = spec.micro_batch * spec.length * run.model.vocabulary * spec.width if spec.loss == "full" else 0.0
    # At stage 1 a rank has dropped the gradients of other ranks' partitions by then.
    own = states.gradients / (spec.ranks if spec.layout.stage == 1 else 1)
    result["optimizer"] = _phase(logits=logits, gradients=own, buffers=held + _stepping(run))
    result["evaluation"] = _phase(activations=step.evaluation, gradients=allocated, buffers=held + gathered)
    # Sharded parameters are gathered tensor by tensor, in fp32 (train/engines/base.py, part).
    tensor = BYTES["fp32"] * parameters.largest_trained if spec.ranks > 1 else 0.0
    result["saving"] = _phase(gradients=allocated, buffers=held + tensor)
    for name, values in result.items():
        if name != "loading":
            values["total"] = static + sum(values.values())
    return result


def terms(run: PlannedRun, at_peak: dict[str, float], peak: str) -> dict[str, Any]:
    """Return the GPU's terms, which add up to the total of the phase `peak`.

    If the peak comes before all gradients exist, `activations` is what activations take beyond the gradients' memory.
    """
    states, reserve = run.states, run.spec.reserve
    total = at_peak["total"] + reserve
    named = {
        "frozen_weights": states.frozen_weights,
        "adapter_weights": states.trained_weights,
        "gradients": states.gradients,
        "master": states.master,
        "moments": states.moments,
    }
    gpu: dict[str, Any] = {name: int(value) for name, value in named.items()}
    gpu["model_states"] = int(states.total)
    gpu["logits"] = int(at_peak.get("logits", 0))
    gpu["buffers"] = int(at_peak.get("buffers", 0))
    gpu["reserve"] = reserve
    gpu["total"] = int(total)
    gpu["activations"] = gpu["total"] - reserve - gpu["model_states"] - gpu["logits"] - gpu["buffers"]
    gpu["peak_phase"] = peak
    return gpu


def layer_parameters(model: ModelSpec) -> int:
    """Return the parameters of one layer."""
    return sum(module.parameters for module in model.modules if "{}" in module.path)


def largest_module(model: ModelSpec) -> int:
    """Return the parameters of the largest module."""
    return max(module.parameters for module in model.modules)


def _phase(
    activations: float = 0.0, logits: float = 0.0, gradients: float = 0.0, buffers: float = 0.0
) -> dict[str, float]:
    return {"activations": activations, "logits": logits, "gradients": gradients, "buffers": buffers}


def _resident(run: PlannedRun) -> float:
    """Return the bytes that the engine always holds in addition to the model states."""
    spec, layout, parameters = run.spec, run.spec.layout, run.parameters
    if layout.engine == "ddp" and spec.ranks > 1:
        return parameters.trained * 4.0  # the reducer's buckets beside .grad (reducer.hpp)
    if run.deepspeed_stage == 3:
        # __ipg_bucket_flat_buffer (stage3.py), into which its all-to-all writes.
        bucket = float(run.buckets.reduce * spec.width)
        if not layout.within_node:
            return bucket
        # hpZ's second shard of the weights (partition_parameters.py, ds_secondary_tensor)
        return bucket + (run.model.parameters + parameters.trained) * spec.width / spec.ranks_per_node
    if run.deepspeed_stage in (1, 2) and layout.optimizer != "gpu":
        return float(parameters.largest_trained * spec.width)  # temp_grad_buffer_for_gpu_offload
    return 0.0


def _gathered(run: PlannedRun) -> float:
    """Return the peak bytes of gathered weights."""
    spec, model = run.spec, run.model
    if spec.layout.stage < 3:
        return 0.0
    everything = model.parameters + run.parameters.trained
    if spec.layout.engine == "fsdp":
        # The layer in use and the next one, or the root's own: embedding, head and last norm (fully_shard).
        root = everything - model.layers * layer_parameters(model)
        return float(min(everything, root + 2 * layer_parameters(model)) * spec.width)
    # max_live_parameters stops the prefetching, not the fetching of the module in use
    # (partitioned_param_coordinator.py, fetch_sub_module): up to a layer more than that was traced, in models where
    # head or embedding is a large part of it. What was fitted to CPU ranks (glibc_heap.py) includes it.
    over = 0 if spec.on_cpu else layer_parameters(model)
    return float(min(everything, run.buckets.live + over) * spec.width)


def _gradient_buckets(run: PlannedRun) -> float:
    """Return the bytes of the gradient buckets, which are allocated with the first gradient (stage_1_and_2.py,
    setup_buckets)."""
    if run.deepspeed_stage not in (1, 2):
        return 0.0
    return float(run.buckets.reduce * (2 if run.buckets.overlap else 1) * run.spec.width)


def _reducing(run: PlannedRun) -> float:
    """Return the bytes that reducing gradients takes at the end of the backward pass."""
    spec, parameters = run.spec, run.parameters
    if run.deepspeed_stage == 0 and spec.ranks > 1:
        # Gradients are joined until they are more than the limit (engine.py, allreduce_no_retain).
        return float(min(parameters.trained, GATHER_LIMIT + parameters.largest_trained) * spec.width)
    if run.deepspeed_stage in (1, 2) and parameters.largest_trained > run.buckets.reduce:
        # A gradient that is larger than the bucket gets one of its own (stage_1_and_2.py). For a tied embedding that is
        # trained the tracer has counted more: its two gradients and their sum, just before.
        return float(parameters.largest_trained * spec.width) if parameters.frozen or not run.model.tied else 0.0
    return 0.0


def _stepping(run: PlannedRun) -> float:
    """Return the bytes that the optimizer step allocates and frees."""
    spec, layout, parameters = run.spec, run.spec.layout, run.parameters
    if layout.optimizer != "gpu":
        return 0.0
    share = parameters.trained / (1 if layout.stage == 0 else spec.ranks)
    if layout.engine != "deepspeed":
        return 4.0 * share  # torch's AdamW with foreach: the square roots of the second moment
    if layout.stage == 0:
        return 8.0 * share  # gradients in fp32, and the square roots
    norm = 8.0 * min(share, parameters.largest_trained)  # of a gradient in fp64 (get_grad_norm_direct)
    if layout.stage == 3:
        return max(8.0 * share, norm)  # gradients in fp32, and the square roots
    # Joined gradients, then in fp32 (stage_1_and_2.py, step).
    return spec.width * share + max(4.0 * share, norm)
