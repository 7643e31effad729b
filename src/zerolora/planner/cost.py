"""The cost model: seconds of an optimizer step under a strategy, term by term, and the bytes each collective moves.

Every figure is of one rank. The model is a roofline: matrix products at the device's rate or at the speed at which
their weights are read, everything else at the speed of memory, and none of it faster than the host can issue it.
What is sent is what DeepSpeed 0.19 sends for LoRA, which differs from the ZeRO paper's 2Ψ and 3Ψ: the rule is said
where it is written, with the file and function it was read in and, where it was, counted (two ranks, a small Llama).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, Literal

from zerolora.memory.states import MASTER, MOMENTS
from zerolora.planner.hardware import Hardware
from zerolora.strategies import Strategy

# What one transformer layer of transformers 5.23 does beside its matrix products, counted operation by operation in a
# two-layer and a four-layer Llama (multi-head, MLP 2.75 x hidden), with and without peft 0.21's adapters on every
# linear module: (forward, backward).
OPERATIONS = {"lora": (66, 102), "full": (38, 71)}
"""Operations issued, matrix products included."""
TRAFFIC = {
    ("lora", 2): (133, 216),
    ("full", 2): (80, 176),
    ("lora", 4): (111, 168),
    ("full", 4): (58, 128),
}
"""Bytes read and written, in tokens x hidden x width; by kind and width. Norms compute in fp32: 16 bits need more."""
SCORES = {2: (13.6, 12.5), 4: (5.6, 3.5)}
"""Bytes that eager attention adds, in heads x length² x width; by width. Other kernels write no score matrix."""
LOGITS = 2 * (4 + 4)
"""Bytes beside `width`, per logit: an fp32 copy and its fp32 gradient, each written and read."""
ATTENTION_BACKWARD = {"eager": 2.0, "sdpa": 2.5, "flash": 2.5}
"""Attention's backward products over its forward ones; fused kernels recompute the scores (arXiv 2205.14135, 3.1)."""

HOOK_OPERATIONS = 100
"""What DeepSpeed's stage-3 hooks cost the host for a linear module and a pass, in operations: 90 without and 115 with
checkpointing. Measured on one rank, where nothing is sent, as 1.1 and 1.4 ms beside operations of 12 us: a 4- and a
12-layer Llama with adapters on all linear modules."""
TENSOR_OPERATIONS = 15
"""What a step costs the host for each trained tensor (hooks, buckets, clipping, AdamW), in operations: 0.14 and
0.22 ms in the same two models at stage 0."""
ADAM_BYTES = 100
"""Bytes a parameter that torch's AdamW moves on a GPU: eight passes over states (torch/optim/adamw.py, foreach), and
unscaling, clipping and the copy to the working weights."""
BATCH_BYTES = 4 * 8
"""Bytes a token of a batch: ids, labels, positions and mask as int64."""

GATHER: Final = "all_gather"
SCATTER: Final = "reduce_scatter"
REDUCE: Final = "all_reduce"
Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
Scope = Literal["all", "node", "across"]


@dataclass(frozen=True)
class Work:
    """One optimizer step of one rank: `accumulation` micro-steps of `micro_batch` rows of `length` tokens."""

    length: int
    """Tokens of a packed row, padding included."""
    micro_batch: int
    """Rows of one forward pass."""
    accumulation: int
    """Forward passes of a step."""
    frozen: int
    """Frozen parameters Ψ; 0 = full fine-tuning."""
    trainable: int
    """Trained parameters φ."""
    matmul: int
    """Parameters of the base model's linear modules, the output head too (also where it is tied), adapters not."""
    modules: int
    """Linear modules, the output head too: stage 3 gathers one after another."""
    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocabulary: int
    attended: float
    """Tokens that a token's scores are computed with, in the mean: all of the packed row where a mask hides those of
    others, half of its own row where kernels leave out the rest."""
    supervised: float
    """Share of positions for which logits are made."""
    checkpointing: bool
    attention: Literal["eager", "sdpa", "flash"]
    width: Literal[2, 4]
    """Bytes of a number in training."""
    live: int = 1_000_000_000
    """stage3_max_live_parameters; DeepSpeed's default."""
    outside: int = 0
    """Parameters outside the layers: embedding, head, last norm."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step."""
        return self.micro_batch * self.length

    @property
    def kind(self) -> Literal["lora", "full"]:
        """Which parameters are trained."""
        return "lora" if self.frozen else "full"


@dataclass(frozen=True)
class Cost:
    """Seconds of one optimizer step. The terms add up to the step: what runs behind computation is in `hidden`."""

    forward: float
    backward: float
    recompute: float
    optimizer: float
    communication_node: float
    """Collectives that the links inside a node limit."""
    communication_network: float
    """Collectives that the network between nodes limits."""
    offload: float
    """To and from host and disk."""
    input: float
    """Batches to the device."""
    overhead: float
    """Host time to issue operations, as far as it exceeds the computation."""
    hidden: float
    """Communication behind computation; not part of the step."""
    moved: dict[str, float]
    """Bytes that a rank sends in a step, by collective."""

    @property
    def terms(self) -> dict[str, float]:
        """The seconds that add up to the step, by name."""
        names = [field.name for field in fields(self) if field.name not in ("hidden", "moved")]
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.terms.values())


def step_seconds(work: Work, strategy: Strategy, hardware: Hardware) -> Cost:
    """Return what one optimizer step costs, in seconds and in bytes."""
    forward, backward, recompute = (seconds * work.accumulation for seconds in _passes(work, hardware))
    computing = forward + backward + recompute
    issuing = _operations(work, strategy) * hardware.kernel_seconds
    overhead = issuing if _host_waits(strategy, hardware) else max(0.0, issuing - computing)
    collectives = list(_collectives(work, strategy, hardware))
    node, network, hidden = _communication(collectives, strategy, hardware, computing + overhead)
    moved: dict[str, float] = {}
    for each in collectives:
        moved[each.name] = moved.get(each.name, 0.0) + each.sent(hardware)
    return Cost(
        forward=forward,
        backward=backward,
        recompute=recompute,
        optimizer=_optimizer(work, strategy, hardware),
        communication_node=node,
        communication_network=network,
        offload=_offload(work, strategy, hardware),
        input=work.accumulation * (work.tokens * BATCH_BYTES / hardware.host.bandwidth + hardware.host.latency),
        overhead=overhead,
        hidden=hidden,
        moved=moved,
    )


def useful_flops(work: Work) -> dict[str, float]:
    """Return the FLOPs of training that nothing can save, as coefficients: of each token, of each row's squared length
    and of each supervised token, for which logits are made.

    As model FLOPs utilisation (MFU) counts them (arXiv 2204.02311, appendix B): nothing is computed twice, attention
    has no mask. A trained weight costs 6 a token, a frozen one 4: it needs no gradient of its own, as in `_passes`.
    """
    head = work.vocabulary * work.hidden
    base, adapters = (4, work.trainable) if work.frozen else (6, 0)
    return {
        "token": float(base * (work.matmul - head) + 6 * adapters),
        "squared_token": float(12 * work.heads * work.head_dim * work.layers),
        "supervised_token": float(base * head),
    }


def explain(cost: Cost) -> str:
    """Return the cost as lines for people: the terms from the largest on, then the bytes of every collective."""
    lines = [f"{cost.total:.3g} s a step"]
    for name, seconds in sorted(cost.terms.items(), key=lambda item: -item[1]):
        if seconds:
            lines.append(f"  {name:<22}{seconds:>10.3g} s {seconds / cost.total:>6.1%}")
    if cost.hidden:
        lines.append(f"  {'behind computation':<22}{cost.hidden:>10.3g} s of communication")
    lines += [f"  {name:<30}{count / 1e9:>10.3g} GB sent by a rank" for name, count in cost.moved.items() if count]
    return "\n".join(lines)


# Computation


def _passes(work: Work, hardware: Hardware) -> tuple[float, float, float]:
    """Return the seconds of forward, backward and recompute of one micro-step."""
    tokens, head = work.tokens, work.vocabulary * work.hidden
    body, adapters = work.matmul - head, work.trainable if work.frozen else 0
    logits = tokens * work.supervised
    # 2 a parameter and token (arXiv 2001.08361, 2.1); q·k and scores·v: 4 · attended · heads · head_dim a token.
    attention = 4 * work.attended * tokens * work.heads * work.head_dim * work.layers
    products = 2 * tokens * (body + adapters)
    # Backward has one product for the input and one for the weight; a frozen weight needs none (arXiv 2106.09685).
    per_weight = 1 if work.frozen else 2
    forward_flops = products + attention + 2 * logits * head
    backward_flops = (
        per_weight * (2 * tokens * body + 2 * logits * head)
        + 2 * 2 * tokens * adapters
        + ATTENTION_BACKWARD[work.attention] * attention
    )
    layer_forward, layer_backward = _traffic(work)
    unembedding = logits * work.vocabulary * (work.width + LOGITS)
    forward = _roofline(forward_flops, work.matmul * work.width, layer_forward + unembedding, hardware)
    backward = _roofline(backward_flops, work.matmul * work.width, layer_backward + unembedding, hardware)
    recompute = _roofline(products + attention, body * work.width, layer_forward, hardware)
    return forward, backward, recompute if work.checkpointing else 0.0


def _traffic(work: Work) -> tuple[float, float]:
    """Return the bytes that all layers read and write beside their products, forward and backward."""
    per_layer = work.tokens * work.hidden * work.width
    forward, backward = TRAFFIC[work.kind, work.width]
    per_score = work.heads * work.length * work.tokens * work.width if work.attention == "eager" else 0
    scores_forward, scores_backward = SCORES[work.width]
    return (
        work.layers * (forward * per_layer + scores_forward * per_score),
        work.layers * (backward * per_layer + scores_backward * per_score),
    )


def _roofline(flops: float, weights: float, traffic: float, hardware: Hardware) -> float:
    return max(flops / hardware.rate, weights / hardware.memory_bandwidth) + traffic / hardware.memory_bandwidth


def _operations(work: Work, strategy: Strategy) -> float:
    """Return the operations that the host issues in one step."""
    forward, backward = OPERATIONS[work.kind]
    passes = work.layers * (forward + backward + (forward if work.checkpointing else 0))
    if strategy.stage == 3 and strategy.engine == "deepspeed":
        passes += HOOK_OPERATIONS * work.modules * (3 if work.checkpointing else 2)
    tensors = work.modules * (2 if work.frozen else 1)  # an adapter is two matrices
    return work.accumulation * passes + TENSOR_OPERATIONS * tensors


def _host_waits(strategy: Strategy, hardware: Hardware) -> bool:
    """Return whether issuing adds to computing. A GPU's host runs ahead of it, a CPU rank is its own host."""
    # partition_parameters.py, _all_gather_sequential and _all_gather_dtype: weights on the host go up by a blocking
    # .to(device) in each module's hook, so the host never gets ahead (an upper bound: gathers run meanwhile).
    return hardware.cpu or strategy.parameters != "gpu"


def _optimizer(work: Work, strategy: Strategy, hardware: Hardware) -> float:
    updated = work.trainable / _owners(strategy, hardware)
    if hardware.cpu or strategy.optimizer != "gpu":
        return updated / hardware.cpu_adam
    return updated * ADAM_BYTES / hardware.memory_bandwidth


def _owners(strategy: Strategy, hardware: Hardware) -> int:
    """Return among how many ranks the optimizer states are shared out."""
    if strategy.stage == 0:
        return 1
    # FSDP's hybrid shard repeats every state on each node; hpZ repeats weights only (arXiv 2306.10209, 4.2).
    return hardware.gpus_per_node if strategy.engine == "fsdp" and strategy.within_node else hardware.ranks


# Communication


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a step: how many, and the bytes of all their full buffers together."""

    name: str
    kind: Kind
    scope: Scope
    """all: every rank. node: the ranks of a node. across: ranks of the same place on every node."""
    size: float
    calls: float

    def members(self, hardware: Hardware) -> int:
        """Return how many ranks take part."""
        return {"all": hardware.ranks, "node": hardware.gpus_per_node, "across": hardware.nodes}[self.scope]

    def sent(self, hardware: Hardware) -> float:
        """Return the bytes that a rank sends in a ring: (n-1)/n of the buffer, to all-reduce twice (1910.02054, 7)."""
        members = self.members(hardware)
        return (2 if self.kind == REDUCE else 1) * self.size * (members - 1) / members

    def seconds(self, hardware: Hardware) -> tuple[float, float]:
        """Return the seconds on the links of a node and those on the network: one of them is 0, the slower one is not.

        A ring through several nodes enters and leaves each once: a node's adapters carry what a rank sends.
        """
        sent = self.sent(hardware)
        lanes = hardware.gpus_per_node if self.scope == "across" else 1
        inside = 0.0 if self.scope == "across" else sent / hardware.node.bandwidth
        outside = 0.0 if self.scope == "node" or hardware.nodes == 1 else sent * lanes / hardware.network.bandwidth
        seconds = max(inside, outside) + self.calls * self._latency(hardware)
        return (seconds, 0.0) if outside <= inside else (0.0, seconds)

    def _latency(self, hardware: Hardware) -> float:
        """Return the seconds of one call's hops (NCCL, src/graph/tuning.cc, ncclTopoTuneModel: nsteps, nInterSteps)."""
        hops = self.members(hardware) - 1
        far = 0 if self.scope == "node" else hardware.nodes - 1
        once = (hops - far) * hardware.node.latency + far * hardware.network.latency
        return (2 if self.kind == REDUCE else 1) * once


def _collectives(work: Work, strategy: Strategy, hardware: Hardware) -> Iterator[Collective]:
    if strategy.engine == "fsdp":
        yield from _fsdp(work, strategy, hardware)
    elif strategy.stage == 3:
        yield from _stage_3(work, strategy)
    else:
        yield from _replicated(work, strategy)


def _replicated(work: Work, strategy: Strategy) -> Iterator[Collective]:
    """Stages 0 to 2 and DistributedDataParallel, which leaves all micro-steps but the last unsynchronised."""
    # DistributedDataParallel reduces the adapter's own gradients, which are fp32; DeepSpeed's are of the weights' type.
    gradients = work.trainable * (MASTER if strategy.engine == "ddp" else work.width)
    # engine.py, allreduce_gradients: stages 0 and 1 reduce at the step's last micro-step, stage 2 at every one. Stages
    # 1 and 2 all-reduce whole buckets (stage_1_and_2.py, average_tensor and allreduce_and_scatter, with
    # use_multi_rank_bucket_allreduce at its default), so they send 2φ where a reduce-scatter would send φ. Counted.
    times = work.accumulation if strategy.stage == 2 else 1
    yield Collective("all_reduce gradients", REDUCE, "all", times * gradients, times)
    if strategy.stage:
        # stage_1_and_2.py, step: all_gather_dp_groups. Counted.
        yield Collective("all_gather trained weights", GATHER, "all", gradients, 1)


def _stage_3(work: Work, strategy: Strategy) -> Iterator[Collective]:
    # partitioned_param_coordinator.py, fetch_sub_module. 2 (Ψ + φ) less what is still live when the pass turns round:
    # counted 1.85-1.95, 1.95-2.1 and 2.0-2.15 Ψ with 0.17, 0.07 and 0.01 Ψ allowed live, and 1.05-1.25 Ψ for models
    # below the limit. Recomputing gathers nothing a third time: a layer's backward pass has its weights already.
    gathered, width = gathered_elements(work), 1 if strategy.quantized else work.width
    calls = 2 * work.modules * work.accumulation
    if strategy.within_node:
        # stage3.py, invalidate_secondary_tensor: a step makes only trained weights' second shares stale, and all of
        # them are there after the first use. So frozen weights never cross the network again.
        # Counted on 2 x 2 ranks: φ a step among all ranks, the rest among two.
        yield Collective("all_gather weights", GATHER, "all", work.trainable * width, work.modules)
        yield Collective(
            "all_gather weights in a node", GATHER, "node", (gathered - work.trainable) * width, calls - work.modules
        )
    else:
        yield Collective("all_gather weights", GATHER, "all", gathered * width, calls)
    # stage3.py, __avg_scatter_grads at every micro-step; at least hidden² elements each. Counted.
    buckets = math.ceil(work.trainable / (work.hidden * work.hidden))
    size = work.accumulation * work.trainable * work.width
    yield Collective("reduce_scatter gradients", SCATTER, "all", size, work.accumulation * buckets)


def _fsdp(work: Work, strategy: Strategy, hardware: Hardware) -> Iterator[Collective]:
    # torch.distributed.fsdp, fully_shard on each layer, reshard_after_forward: a gather forward and one backward. What
    # is outside the layers stays whole between the two: the root's reshard_after_forward is False by default. Counted.
    scope: Scope = "node" if strategy.within_node else "all"
    units = work.layers + 1
    gathered = work.accumulation * (2 * (work.frozen + work.trainable) - work.outside) * work.width
    # train/engines/torch_engines.py: reduced in fp32, at the last micro-step only.
    gradients = work.trainable * MASTER
    yield Collective("all_gather weights", GATHER, scope, gathered, work.accumulation * (2 * units - 1))
    yield Collective("reduce_scatter gradients", SCATTER, scope, gradients, units)
    if strategy.within_node:
        share = gradients / hardware.gpus_per_node
        yield Collective("all_reduce gradients", REDUCE, "across", share, units)


def gathered_elements(work: Work) -> float:
    """Return the parameters that stage 3 gathers in one step of all micro-steps."""
    parameters = work.frozen + work.trainable
    return work.accumulation * (2 * parameters - min(parameters, work.live))


def _communication(
    collectives: list[Collective], strategy: Strategy, hardware: Hardware, computing: float
) -> tuple[float, float, float]:
    """Return the seconds of communication in nodes, between nodes, and hidden behind `computing` seconds."""
    pairs = [each.seconds(hardware) for each in collectives]
    node, network = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    # Gathers run ahead on a stream of their own (overlap_comm, set by engine_config.py on GPUs; FSDP always).
    # The adapter's gradients at stages 0 to 2 are reduced after the backward pass.
    overlaps = strategy.stage == 3 and not hardware.cpu
    hidden = min(node + network, computing) if overlaps else 0.0
    shown = 1 - hidden / (node + network) if hidden else 1.0
    return node * shown, network * shown, hidden


# Offload


def _offload(work: Work, strategy: Strategy, hardware: Hardware) -> float:
    return _optimizer_offload(work, strategy, hardware) + _parameter_offload(work, strategy, hardware)


def _optimizer_offload(work: Work, strategy: Strategy, hardware: Hardware) -> float:
    if strategy.optimizer == "gpu":
        return 0.0
    share = work.trainable / _owners(strategy, hardware)
    # stage_1_and_2.py, copy_grads_in_partition, and stage3.py, partition_grads: with accumulation, gradients go to the
    # host at every micro-step that reduces and come back at the next to be added to. At the step's end they go as
    # fp32, and step() brings the weights back.
    reducing = work.accumulation if strategy.stage >= 2 else 1
    to_and_fro = (2 * reducing - 1) * work.width if work.accumulation > 1 else 0
    seconds = share * (to_and_fro + MASTER + work.width) / hardware.host.bandwidth
    if strategy.optimizer == "nvme":
        # stage3.py, _optimizer_states_and_gradient_swap_in and _out; the disk serves all ranks of a node.
        states = share * (MASTER + MOMENTS) * hardware.gpus_per_node
        seconds += states / hardware.disk.read + states / hardware.disk.write
    return seconds


def _parameter_offload(work: Work, strategy: Strategy, hardware: Hardware) -> float:
    if strategy.parameters == "gpu":
        return 0.0
    # A rank copies its share up before each gather, on the gathers' stream and waited for (_host_waits): not hidden.
    share = gathered_elements(work) / hardware.ranks * work.width
    seconds = share / hardware.host.bandwidth
    if strategy.parameters == "nvme":
        # _ensure_availability_of_partitioned_params reads; stage3.py, _partitioned_params_swap_out writes trained ones.
        trained = work.trainable / hardware.ranks * work.width
        seconds += hardware.gpus_per_node * (share / hardware.disk.read + trained / hardware.disk.write)
    return seconds
