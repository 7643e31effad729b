"""One configuration's bytes, term by term: on each GPU, on each host, on disk, at the phase that needs most.

The step is played on the tape (decoder.py); around it stand the model states (states.py), and what the engines
allocate besides, each with its source.
"""

from dataclasses import dataclass, replace
from typing import Any

from zerolora.memory.adapters import Finetuning, Weights, weights
from zerolora.memory.buffers import Buckets, buckets
from zerolora.memory.decoder import Phases, evaluation, phases
from zerolora.memory.model_spec import ModelSpec
from zerolora.memory.projections import ForwardSpec, Trained
from zerolora.memory.states import BYTES, MOMENTS, States, model_states
from zerolora.strategies import STRATEGIES, Strategy
from zerolora.types import Attention, Loss

# Resident set of a rank that has imported torch, deepspeed, transformers, peft and datasets and loaded nothing;
# measured by benchmarks/process_memory.py.
PROCESS_BYTES = 431 * 1024**2
# Of CPU ranks, fitted to what benchmarks/memory/measure.py --cpu found with glibc 2.36: the process once it has made
# steps of many lengths; what several ranks' exchange adds, and ZeRO from stage 1 on; what lies free in the heap: of
# small blocks a share (tape.py), and under stage 3 of the model's bytes, where gathered weights were, the more the less
# is kept between.
CPU_RANK_BYTES, CPU_GROUP_BYTES, CPU_ZERO_BYTES = 487 * 1024**2, 74 * 1024**2, 46 * 1024**2
SMALL_HOLES = 0.15
# By checkpointing: bytes, and share of the model.
STAGE_3_HOLES = {True: (48 * 1024**2, 0.09), False: (0, 0.4)}
GATHER_LIMIT = 500_000_000  # elements that DeepSpeed's stage 0 reduces at a time (runtime/engine.py)
DDP_BUCKET = 25 * 1024**2  # torch.nn.parallel.DistributedDataParallel's bucket_cap_mb
NVME_BUFFERS = 5  # offload_param.buffer_count (runtime/zero/offload_config.py)
DISK_CHECKPOINTS = 2  # kept beside each other, and the best one


@dataclass(frozen=True)
class Plan:
    """Everything that a prediction depends on beside the model."""

    strategy: str
    finetuning: Finetuning
    nodes: int
    ranks_per_node: int
    micro_batch: int
    accumulation: int
    length: int
    """Tokens of the longest packed row."""
    activation_checkpointing: bool
    attention: Attention
    precision: str
    masked: bool = True
    """Whether attention gets a mask: rows are packed, or padded to the longest."""
    loss: Loss = "full"
    logits: int = 0
    """Positions of a row that get logits; 0: all."""
    on_cpu: bool = False
    """Ranks compute on the CPU: what would be on a GPU is on the host."""
    keeps_best: bool = False
    """Whether the adapter of the lowest validation loss is kept beside the present one."""
    reserve: int = 0
    """Bytes per GPU for the CUDA context, NCCL and fragmentation."""
    buckets: Buckets | None = None
    """Sizes of a DeepSpeed JSON of the user's own; None for those that render writes."""
    own: Strategy | None = None
    """The layout that a DeepSpeed JSON of the user's own says, for a `strategy` that is not a named one."""

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def layout(self) -> Strategy:
        """The strategy's layout."""
        return self.own or STRATEGIES[self.strategy]


@dataclass(frozen=True)
class Prediction:
    """Bytes by term. `gpu` and `host` have a total, which is that of the phase named by peak_phase."""

    gpu: dict[str, Any]
    host: dict[str, Any]
    disk: dict[str, Any]
    phases: dict[str, int]
    """Bytes on the GPU in each phase, reserve included."""
    offloaded: int
    """Bytes of one rank that offload keeps on the host."""
    offloaded_step: int
    """Bytes of one rank that the host's optimizer takes besides, for a while."""
    buckets: Buckets


def predict(shape: ModelSpec, plan: Plan) -> Prediction:
    """Return the bytes that a plan needs. Raises UserError if a module to train is not in the model."""
    layout, width = plan.layout, BYTES[plan.precision]
    what = weights(shape, plan.finetuning, width)
    states = model_states(what.frozen_bytes, what.trained, layout, plan.ranks, plan.ranks_per_node, plan.precision)
    sizes = plan.buckets or sized(shape, plan)
    played, evaluated = _played(shape, plan, what, sizes)
    small = played["small_blocks"]["total"]
    played = {name: kinds for name, kinds in played.items() if name != "small_blocks"}
    resident = _resident(shape, plan, what, sizes)
    gathered = _gathered(shape, plan, what, sizes)
    by_phase = _phases(shape, plan, what, states, sizes, played, evaluated, resident, gathered)
    peak = max(by_phase, key=lambda name: by_phase[name]["total"])
    gpu = _gpu_terms(states, by_phase[peak], plan.reserve, peak)
    totals = {name: int(values["total"]) for name, values in by_phase.items()}
    return Prediction(
        gpu,
        _host(shape, plan, what, states, sizes, totals, small),
        _disk(shape, plan, what, states),
        {name: value + plan.reserve for name, value in totals.items()},
        int(offloaded_bytes(plan, what, states)),
        int(_stepping_on_host(plan, what)),
        sizes,
    )


def sized(shape: ModelSpec, plan: Plan) -> Buckets:
    """Return the sizes that render writes for a plan."""
    what = weights(shape, plan.finetuning, BYTES[plan.precision])
    layer, largest = layer_parameters(shape), largest_module(shape)
    return buckets(plan.layout, shape.hidden, what.trained, layer, largest, shape.parameters, not plan.on_cpu)


def layer_parameters(shape: ModelSpec) -> int:
    """Return the parameters of one layer."""
    return sum(module.parameters for module in shape.modules if "{}" in module.path)


def largest_module(shape: ModelSpec) -> int:
    """Return the parameters of the largest module."""
    return max(module.parameters for module in shape.modules)


def _played(shape: ModelSpec, plan: Plan, what: Weights, sizes: Buckets) -> tuple[Phases, int]:
    """Return what the tape says of a step, and of a forward pass without gradients, in bytes."""
    layout, width = plan.layout, BYTES[plan.precision]
    step = ForwardSpec(
        plan.micro_batch,
        plan.length,
        width,
        plan.attention,
        plan.masked,
        plan.activation_checkpointing,
        plan.loss,
        plan.logits,
        layout.engine == "deepspeed" and layout.stage == 3,
    )
    adapter = 4 if layout.engine == "ddp" else width
    # Under stage 2 a rank keeps its part of each gradient; an offloaded one leaves, at stage 3 its place is there.
    share = 1 / plan.ranks if layout.stage >= 2 else 1.0
    if layout.optimizer != "gpu" or (layout.engine == "deepspeed" and layout.stage == 3):
        share = 0.0
    trained = Trained(
        plan.finetuning.method, what.ranks, adapter, share, plan.finetuning.dropout > 0, _bucket(plan, sizes)
    )
    return phases(shape, step, trained), evaluation(shape, replace(step, checkpointing=False), trained)


def _resident(shape: ModelSpec, plan: Plan, what: Weights, sizes: Buckets) -> dict[str, float]:
    """Return what the engine holds all the time beside model states."""
    layout, width = plan.layout, BYTES[plan.precision]
    found: dict[str, float] = {}
    if layout.engine == "ddp" and plan.ranks > 1:
        found["reduce_buckets"] = what.trained * 4.0  # the reducer's buckets beside .grad (reducer.hpp)
    if layout.engine == "deepspeed" and layout.stage == 3:
        # __ipg_bucket_flat_buffer (stage3.py); its all-to-all writes beside it.
        found["reduce_bucket"] = float(sizes.reduce * width)
        if layout.within_node:
            # hpZ's second share of the weights (partition_parameters.py, ds_secondary_tensor)
            found["secondary_weights"] = (shape.parameters + what.trained) * width / plan.ranks_per_node
    if layout.engine == "deepspeed" and layout.stage in (1, 2) and layout.optimizer != "gpu":
        found["offload_buffer"] = float(what.largest_trained * width)  # temp_grad_buffer_for_gpu_offload
    return found


def _gathered(shape: ModelSpec, plan: Plan, what: Weights, sizes: Buckets) -> float:
    """Return the bytes of weights that are gathered at a time."""
    layout, width = plan.layout, BYTES[plan.precision]
    if layout.stage < 3:
        return 0.0
    everything = shape.parameters + what.trained
    if layout.engine == "fsdp":
        # The layer at work and the next one, or the root's own: embedding, head and last norm (fully_shard).
        root = everything - shape.layers * layer_parameters(shape)
        return float(min(everything, root + 2 * layer_parameters(shape)) * width)
    # Prefetching stops at max_live_parameters, the fetching of a module at work does not
    # (partitioned_param_coordinator.py, fetch_sub_module).
    # Up to a layer more than may be live was traced, where head or embedding take a large part of that. What was fitted
    # to CPU ranks (STAGE_3_HOLES) has it in it.
    over = 0 if plan.on_cpu else layer_parameters(shape)
    return float(min(everything, sizes.live + over) * width)


def _phases(
    shape: ModelSpec,
    plan: Plan,
    what: Weights,
    states: States,
    sizes: Buckets,
    played: Phases,
    evaluated: int,
    resident: dict[str, float],
    gathered: float,
) -> dict[str, dict[str, float]]:
    """Return the bytes of each phase by term, model states without gradients apart."""
    width = BYTES[plan.precision]
    static = states.frozen_weights + states.trained_weights + states.master + states.moments
    # From the second micro-step on, gradients are there all the time; at stage 3 their place is (stage3.py,
    # grad_partitions_flat_buffer).
    always = plan.layout.engine == "deepspeed" and plan.layout.stage == 3
    kept = states.gradients if plan.accumulation > 1 or always else 0.0
    held = sum(resident.values())
    found: dict[str, dict[str, float]] = {"loading": {"total": static - states.master - states.moments}}
    for name, kinds in played.items():
        gradients = kinds.get("gradients", 0)
        extra = _reducing(shape, plan, what, sizes) if name == "backward_end" else 0.0
        found[name] = {
            "activations": kinds.get("activations", 0),
            "logits": kinds.get("logits", 0),
            "gradients": max(kept, gradients),
            "buffers": held + gathered + extra + kinds.get("buffers", 0),
        }
    if plan.layout.engine == "deepspeed" and plan.layout.stage == 1 and plan.layout.optimizer == "gpu":
        # All gradients, a bucket of them, and those of this rank's partition once more (stage_1_and_2.py,
        # copy_grads_in_partition).
        copied = BYTES[plan.precision] * (what.trained / plan.ranks + sizes.reduce)
        reducing = {"activations": 0.0, "logits": 0.0, "gradients": states.gradients, "buffers": held + copied}
        found["reducing"] = reducing
    # What is held until the step is over is there at the optimizer's too.
    logits = plan.micro_batch * plan.length * shape.vocabulary * width if plan.loss == "full" else 0.0
    found["optimizer"] = {
        "activations": 0.0,
        "logits": logits,
        "gradients": states.gradients / (plan.ranks if plan.layout.stage == 1 else 1),  # the rest is reduced away
        "buffers": held + _stepping(plan, what),
    }
    kept = states.gradients if always else 0.0
    found["evaluation"] = {"activations": evaluated, "logits": 0.0, "gradients": kept, "buffers": held + gathered}
    found["saving"] = {
        "activations": 0.0,
        "logits": 0.0,
        "gradients": kept,
        # What is shared out is gathered tensor by tensor, in fp32 (train/engines/base.py, part).
        "buffers": held + (BYTES["fp32"] * what.largest_trained if plan.ranks > 1 else 0.0),
    }
    for name, values in found.items():
        if name != "loading":
            values["total"] = static + sum(values.values())
    return found


def _bucket(plan: Plan, sizes: Buckets) -> float:
    """Return the bytes of the buckets that gradients are joined in, there as soon as there is one (stage_1_and_2.py,
    setup_buckets)."""
    if plan.layout.engine != "deepspeed" or plan.layout.stage not in (1, 2):
        return 0.0
    return float(sizes.reduce * (2 if sizes.overlap else 1) * BYTES[plan.precision])


def _reducing(shape: ModelSpec, plan: Plan, what: Weights, sizes: Buckets) -> float:
    """Return what the reduction of gradients takes at the end of the backward pass."""
    layout, width = plan.layout, BYTES[plan.precision]
    if layout.engine != "deepspeed":
        return 0.0
    if layout.stage == 0:
        # Gradients are joined until they are more than the limit (engine.py, allreduce_no_retain).
        return float(min(what.trained, GATHER_LIMIT + what.largest_trained) * width) if plan.ranks > 1 else 0.0
    if layout.stage in (1, 2):
        # Beside the bucket a gradient that is larger than it, in one of its own (stage_1_and_2.py). Of a tied embedding
        # two gradients and their sum were there just before, which the tape has counted.
        own = what.largest_trained if what.largest_trained > sizes.reduce and (what.frozen or not shape.tied) else 0
        return float(own * width)
    return 0.0


def _stepping(plan: Plan, what: Weights) -> float:
    """Return what the optimizer's step takes for a while."""
    layout = plan.layout
    if layout.optimizer != "gpu":
        return 0.0
    share = what.trained / (1 if layout.stage == 0 else plan.ranks)
    if layout.engine != "deepspeed":
        return 4.0 * share  # torch's AdamW with foreach: the square roots of the second moment
    if layout.stage == 0:
        return 8.0 * share  # gradients in fp32, and the square roots
    norm = 8.0 * min(share, what.largest_trained)  # of a gradient in fp64 (get_grad_norm_direct)
    if layout.stage == 3:
        return max(8.0 * share, norm)  # gradients in fp32, and the square roots
    # Joined gradients, then in fp32 (stage_1_and_2.py, step).
    return BYTES[plan.precision] * share + max(4.0 * share, norm)


def _gpu_terms(states: States, at_peak: dict[str, float], reserve: int, peak: str) -> dict[str, Any]:
    """Return the terms of the GPU; gradients that are not there at the peak count for nothing else."""
    total = at_peak["total"] + reserve
    terms = {
        "frozen_weights": states.frozen_weights,
        "adapter_weights": states.trained_weights,
        "gradients": states.gradients,
        "master": states.master,
        "moments": states.moments,
    }
    gpu: dict[str, Any] = {name: int(value) for name, value in terms.items()}
    gpu["model_states"] = int(states.total)
    gpu["logits"] = int(at_peak.get("logits", 0))
    gpu["buffers"] = int(at_peak.get("buffers", 0))
    gpu["reserve"] = reserve
    gpu["total"] = int(total)
    gpu["activations"] = gpu["total"] - reserve - gpu["model_states"] - gpu["logits"] - gpu["buffers"]
    gpu["peak_phase"] = peak
    return gpu


def _host(
    shape: ModelSpec, plan: Plan, what: Weights, states: States, sizes: Buckets, on_gpu: dict[str, int], small: float
) -> dict[str, Any]:
    """Return the terms of one host, all its ranks together; `on_gpu` are the GPU's phases without reserve."""
    width, local, layout = BYTES[plan.precision], plan.ranks_per_node, plan.layout
    processes = (_cpu_process(plan) if plan.on_cpu else PROCESS_BYTES) * local
    # Others than stage 3, which reads tensor by tensor and keeps its share (partition_parameters.py, zero.Init), hold
    # the model once a rank before it moves.
    reading = what.frozen_bytes if plan.finetuning.method != "full" else shape.parameters * width
    loading = reading * local
    if layout.stage == 3 and layout.engine == "deepspeed":
        loading = (reading / plan.ranks + largest_module(shape) * width) * local
    elif layout.engine == "fsdp":
        loading = reading  # rank 0 alone reads, and scatters weight by weight (train/engines/torch_engines.py)
    offloaded = offloaded_bytes(plan, what, states)
    # A checkpoint is the fp32 adapter, two moments and the best adapter so far, if one is kept; and their bytes as they
    # are written, while training goes on (train/checkpoint/store.py; safetensors copies all first). One rank has it.
    gathering = 2.0 * _checkpoint(plan) * (what.trained if what.frozen else 0)
    swapping = 0.0
    if layout.parameters == "nvme":
        # Buffers to read into and to write from (partitioned_param_swapper.py), of the size that render gives them.
        swapping = NVME_BUFFERS * sizes.live / local * width
    by_phase = {
        "loading": {"loading": loading},
        "step": {
            "offload": (offloaded + _stepping_on_host(plan, what)) * local,
            "pinned": swapping * local,
            "saving": gathering,
        },
        "saving": {"offload": offloaded * local, "saving": gathering},
    }
    if plan.on_cpu:
        if layout.stage == 3:
            # The file is mapped, and counts; a lone rank's share of a weight is as large as what it was gathered into.
            gathered = largest_module(shape) * width if plan.ranks == 1 else 0.0
            by_phase["loading"]["loading"] = (reading + reading / plan.ranks + gathered) * local
        heap = _holes(shape, plan) if layout.stage == 3 else SMALL_HOLES * small
        for name, held in (("step", max(on_gpu.values())), ("saving", on_gpu["saving"])):
            by_phase[name] |= {"ranks": held * local, "heap": heap * local}
    peak = max(by_phase, key=lambda name: sum(by_phase[name].values()))
    host: dict[str, Any] = {"processes": processes}
    for name in ("loading", "offload", "pinned", "saving", "ranks", "heap"):
        host[name] = int(by_phase[peak].get(name, 0))
    host["total"] = sum(host.values())
    host["peak_phase"] = peak
    return host


def _cpu_process(plan: Plan) -> float:
    """Return what a CPU rank's process holds beside tensors."""
    sharing = plan.layout.engine == "deepspeed" and plan.layout.stage > 0
    return CPU_RANK_BYTES + CPU_GROUP_BYTES * (plan.ranks > 1) + CPU_ZERO_BYTES * sharing


def _holes(shape: ModelSpec, plan: Plan) -> float:
    """Return what lies free in the heap of a CPU rank under stage 3; one rank alone gathers nothing, and has half."""
    fixed, share = STAGE_3_HOLES[plan.activation_checkpointing]
    return (fixed + share * shape.parameters * BYTES[plan.precision]) / (1 if plan.ranks > 1 else 2)


def offloaded_bytes(plan: Plan, what: Weights, states: States) -> float:
    """Return what offload keeps on the host for one rank.

    Beside the states: 16-bit copies of the partition's weights (stages 1 and 2: stage_1_and_2.py,
    param_buffer_of_bit16_for_cpu_offload_groups) or gradients (stage3.py, grad_partitions_flat_buffer), and a buffer
    for the largest gradient on its way (temp_grad_buffer_for_cpu_offload).
    """
    layout, width = plan.layout, BYTES[plan.precision]
    if layout.optimizer == "gpu":
        return 0.0
    beside = what.trained * width / plan.ranks
    if layout.stage < 3:
        beside += what.largest_trained * width
    return states.host + beside


def _stepping_on_host(plan: Plan, what: Weights) -> float:
    """Return what the optimizer takes for a while on a CPU: the partition's norm in fp64 (stage_1_and_2.py,
    complete_grad_norm_calculation_for_cpu_offload), or AdamW's square root and quotient of it."""
    return 8.0 * what.trained / plan.ranks if plan.layout.optimizer != "gpu" else 0.0


def _checkpoint(plan: Plan) -> int:
    """Return the bytes of a trained parameter in a checkpoint: fp32, its moments, and its value in the best adapter."""
    return BYTES["fp32"] * (1 + plan.keeps_best) + MOMENTS


def _disk(shape: ModelSpec, plan: Plan, what: Weights, states: States) -> dict[str, Any]:
    """Return what the run writes and reads on disk: the base, adapter, checkpoints and merged model once, what is
    offloaded to NVMe once a node."""
    width = BYTES[plan.precision]
    disk = {
        "model": shape.parameters * width,
        "adapter": what.trained * BYTES["fp32"] if what.frozen else 0,
        "checkpoints": (DISK_CHECKPOINTS + plan.keeps_best) * what.trained * _checkpoint(plan),
        "merged": shape.parameters * width,
        "nvme": int(states.disk * plan.ranks_per_node),
    }
    return {**disk, "total": sum(disk.values())}
