"""The cost model: seconds of an optimizer step under a strategy, term by term, and the bytes each collective moves.

Every figure is of one rank. The model is a roofline: matrix products run at the device's rate or at the speed of
reading their weights, everything else at memory bandwidth, and nothing faster than the host issues operations.
Strategies define the collectives (strategies/).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from zerolora.planner.hardware import HardwareRates
from zerolora.strategies.strategy import REDUCE, Behind, Collective, LayerWork, PassWork, StepWork, Strategy, exchanges

MASTER = 4  # bytes of an fp32 master weight

# The work of one layer of transformers 5.23 beside its matrix products, (forward, backward), counted by operation in
# two-layer and four-layer Llamas (multi-head, MLP 2.75 x hidden), with and without adapters of peft 0.21 on every
# linear module.
OPERATIONS = {"lora": (66, 102), "full": (38, 71)}
"""Operations issued, matrix products included."""
TRAFFIC = {
    ("lora", 2): (133, 216),
    ("full", 2): (80, 176),
    ("lora", 4): (111, 168),
    ("full", 4): (58, 128),
}
"""Bytes read and written, in tokens x hidden x width; by kind and width. Norms in fp32 make 16 bits need more."""
FUSED: dict[tuple[str, int], tuple[float, float]] = {
    ("norm", 2): (32.1, 82.1),
    ("norm", 4): (10.1, 34.1),
    ("rotary", 2): (16.5, 34.5),
    ("rotary", 4): (16.5, 34.5),
    ("mlp", 2): (5.5, 11.0),
    ("mlp", 4): (5.5, 11.0),
}
"""Of TRAFFIC, the bytes that a kernel of liger-kernel does not move, by part and width: those of the operations that it
replaces, counted in the same models, less its own (liger_kernel/ops): each input is read and each result written once.
Not measured on a GPU."""
FUSED_OPERATIONS = {"norm": (14, 26), "rotary": (9, 17), "mlp": (1, 2)}
"""Of OPERATIONS, those that a kernel saves, in bf16."""
FUSED_LOGITS = (4, 1)
"""Times that a logit is written or read with liger-kernel, forward and backward: by the head's product, twice and once
by the kernel for losses, by the product of its gradient. Without, each also has the bytes LOGITS."""
SCORES = {2: (13.6, 12.5), 4: (5.6, 3.5)}
"""Further bytes of eager attention, in heads x length² x width; by width. Other kernels write no score matrix."""
LOGITS = 2 * (4 + 4)
"""Bytes of each logit beside `width`: an fp32 copy and its fp32 gradient, each written and read."""
ATTENTION_BACKWARD = {"eager": 2.0, "sdpa": 2.5, "flash": 2.5}
"""Ratio of attention's backward to forward products; fused kernels recompute the scores (arXiv 2205.14135, 3.1)."""

TENSOR_OPERATIONS = 15
"""Host time of a step for each trained tensor (hooks, buckets, clipping, AdamW), in operations: 0.14 and 0.22 ms in the
same models at stage 0."""
CLIPPING_BYTES = 20
"""Bytes that a step moves on a GPU for each trained parameter beside the optimizer's: unscaling, clipping, copy to the
working weights."""
CONTENTION = 0.189
"""Seconds that computation loses for each second in which a collective overlaps with it: 18.9 % on average, 40 % at
most, on A100, H100, MI210 and MI250 (arXiv 2507.03114)."""
DECODED_BYTES = 0.5
"""Bytes of a weight in 4 bits. One in 8 bits is multiplied as it is."""
DECODING_SHARE = 0.28
"""Of the planned memory bandwidth, the share that decoding 4-bit weights reaches, from published steps of QLoRA less
those of LoRA: 0.25 and 0.30 on an A100-40GB (litgpt, tutorials/resource-tables.md: 202 ms of 13B, 88 ms of 7B), 0.21
and 0.29 on an A100-80GB and 0.31 on an L40 (fms-acceleration, scripts/benchmarks/refs), 0.30 on an RTX-4090
(fsdp_qlora, benchmarks_03_2024.md). A kernel alone on an A800: 0.17 to 0.29 (bitsandbytes#1319)."""
DECODING_OPERATIONS = 3
"""Of a module in 4 bits in each pass: its constants, which are quantized too, their mean, and its weights
(bitsandbytes/functional.py, dequantize_4bit)."""
BATCH_BYTES = 4 * 8
"""Bytes of a token in a batch: ids, labels, positions and mask as int64."""


BESIDE = ("hidden", "moved", "between_nodes")
"""Entries of a Cost that are no seconds of the step."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one optimizer step, by terms that add up to it."""

    forward: float
    backward: float
    recompute: float
    optimizer: float
    communication_node: float
    """Collectives limited by the links inside a node."""
    communication_network: float
    """Collectives limited by the network between nodes."""
    offload: float
    """Transfers to and from host and disk."""
    input: float
    """Transfers of batches to the device."""
    overhead: float
    """Host time to issue operations that exceeds the computation."""
    hidden: float
    """Communication that overlaps with computation, beside the terms, which have what that costs."""
    moved: dict[str, float]
    """Bytes that a rank sends in a step, by collective."""
    between_nodes: float
    """Bytes that a node sends over the network in a step."""

    @property
    def terms(self) -> dict[str, float]:
        """The seconds that add up to the step, by name."""
        names = [field.name for field in fields(self) if field.name not in BESIDE]
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.terms.values())


def step_seconds(work: StepWork, strategy: Strategy, hardware: HardwareRates) -> Cost:
    """Predict one optimizer step, in seconds and bytes."""
    forward, backward, recompute = (seconds * work.accumulation for seconds in _passes(work, hardware))
    computing = forward + backward + recompute
    issuing = _operations(work, strategy) * hardware.kernel_seconds
    overhead = issuing if _host_waits(strategy, hardware) else max(0.0, issuing - computing)
    collectives = [*strategy.collectives(work, hardware.ranks_per_node), *exchanges(work, hardware.ranks_per_node)]
    free: dict[Behind, float] = {
        "nothing": 0.0,
        "first_forward": forward / work.accumulation,
        "last_backward": (backward + recompute) / work.accumulation,
        "computation": computing + overhead,
    }
    node, network, hidden = _communication(collectives, hardware, free)
    moved: dict[str, float] = {}
    for each in collectives:
        moved[each.name] = moved.get(each.name, 0.0) + sent_bytes(each, hardware)
    return Cost(
        forward=forward,
        backward=backward,
        recompute=recompute,
        optimizer=_optimizer(work, strategy, hardware),
        communication_node=node,
        communication_network=network,
        offload=_offload(work, strategy, hardware, forward, backward + recompute),
        input=_input(work, hardware),
        overhead=overhead,
        hidden=hidden,
        moved=moved,
        between_nodes=sum(network_bytes(each, hardware) for each in collectives),
    )


def useful_flops(work: StepWork) -> dict[str, float]:
    """Return the minimum FLOPs of training, as coefficients of tokens, squared row lengths and supervised tokens, whose
    logits are computed.

    As in model FLOPs utilisation (MFU; arXiv 2204.02311, appendix B), without recomputation or masks. A trained weight
    costs 6 FLOPs per token, a frozen one 4, since it has no gradient (see `_passes`).
    """
    head = work.vocabulary * work.hidden
    base, adapters = (4, work.trainable - work.merged) if work.frozen else (6, 0)
    before = 2 * work.forwards_before
    base += before
    return {
        "token": float(base * (work.matmul - work.idle - head) + (6 + before) * adapters),
        "squared_token": float((12 + 2 * before) * work.heads * work.head_dim * work.layers),
        "supervised_token": float(base * head),
    }


# Computation


def _passes(work: StepWork, hardware: HardwareRates) -> tuple[float, float, float]:
    """Return the seconds of forward, backward and recompute of one micro-step."""
    if work.counted:
        return _counted_passes(work, work.counted, hardware)
    tokens, head = work.computed, work.vocabulary * work.hidden
    body, adapters = work.matmul - work.idle - head, work.trainable - work.merged if work.frozen else 0
    logits = work.tokens * work.supervised
    # 2 for each parameter and token (arXiv 2001.08361, 2.1); q·k and scores·v: 4 · attended · heads · head_dim a token.
    scores = work.attended * work.tokens - work.saved_scores
    attention = 4 * scores * work.heads * work.head_dim * work.layers
    products = 2 * tokens * (body + adapters) + 2 * work.merging
    # Backward has one product for the input and one for the weight; a frozen weight needs none (arXiv 2106.09685).
    per_weight = 1 if work.frozen else 2
    forward_flops = products + attention + 2 * logits * head
    backward_flops = (
        per_weight * (2 * tokens * body + 2 * logits * head)
        + 2 * 2 * tokens * adapters
        + 2 * 2 * work.merging
        + ATTENTION_BACKWARD[work.attention] * attention
    )
    layer_forward, layer_backward = _traffic(work)
    unembedding = [logits * work.vocabulary * each for each in _logit_traffic(work)]
    decoding = work.decoded * (DECODED_BYTES + work.width) / DECODING_SHARE
    forward = _roofline(forward_flops, work.matmul * work.width, layer_forward + unembedding[0] + decoding, hardware)
    backward = _roofline(backward_flops, work.matmul * work.width, layer_backward + unembedding[1] + decoding, hardware)
    # With many tokens every expert gets some, so all weights are read.
    again = layer_forward + decoding
    recompute = _roofline(products + attention, (work.matmul - head) * work.width, again, hardware)
    return forward * (1 + work.forwards_before), backward, recompute if work.checkpointing else 0.0


def _counted_passes(work: StepWork, counted: LayerWork, hardware: HardwareRates) -> tuple[float, float, float]:
    """Return the same, of layers whose work is counted in the model's class."""
    head, logits = work.vocabulary * work.hidden, work.tokens * work.supervised
    decoding = work.decoded * (DECODED_BYTES + work.width) / DECODING_SHARE

    def seconds(each: PassWork, unembeddings: int, logit_bytes: float) -> float:
        flops = each.flops + each.scores * work.attended / work.length + unembeddings * 2 * logits * head
        weights = (work.matmul - head * (not unembeddings)) * work.width
        return _roofline(flops, weights, each.moved + logits * work.vocabulary * logit_bytes + decoding, hardware)

    unembedding = _logit_traffic(work)
    forward = seconds(counted.forward, 1, unembedding[0])
    backward = seconds(counted.backward, 1 if work.frozen else 2, unembedding[1])
    recompute = seconds(counted.forward, 0, 0.0) if work.checkpointing else 0.0
    return forward * (1 + work.forwards_before), backward, recompute


def _traffic(work: StepWork) -> tuple[float, float]:
    """Return the bytes that all layers move beside their products, forward and backward."""
    per_layer = work.computed * work.hidden * work.width
    forward, backward = map(float, TRAFFIC[work.kind, work.width])
    for part in work.kernels:
        less_forward, less_backward = FUSED.get((part, work.width), (0, 0))
        forward, backward = forward - less_forward, backward - less_backward
    per_score = work.heads * work.length * work.tokens * work.width if work.attention == "eager" else 0
    scores_forward, scores_backward = SCORES[work.width]
    return (
        work.layers * (forward * per_layer + scores_forward * per_score),
        work.layers * (backward * per_layer + scores_backward * per_score),
    )


def _logit_traffic(work: StepWork) -> tuple[float, float]:
    """Return the bytes that a logit moves, forward and backward."""
    if "loss" in work.kernels and work.frozen:
        return FUSED_LOGITS[0] * work.width, FUSED_LOGITS[1] * work.width
    return work.width + LOGITS + work.head_bytes, work.width + LOGITS


def _roofline(flops: float, weights: float, traffic: float, hardware: HardwareRates) -> float:
    return max(flops / hardware.rate, weights / hardware.memory_bandwidth) + traffic / hardware.memory_bandwidth


def _operations(work: StepWork, strategy: Strategy) -> float:
    """Return the operations that the host issues in a step."""
    forward, backward = OPERATIONS[work.kind]
    for part in work.kernels:
        less_forward, less_backward = FUSED_OPERATIONS.get(part, (0, 0))
        forward, backward = forward - less_forward, backward - less_backward
    forwards = 1 + work.forwards_before + work.checkpointing
    layers = float(work.layers * (forward * forwards + backward))
    if work.counted:
        layers = work.counted.forward.operations * forwards + work.counted.backward.operations
    decoding = DECODING_OPERATIONS * work.decoded_modules * (forwards + 1)
    passes = layers + decoding + strategy.host_operations(work)
    tensors = work.modules * (2 if work.frozen else 1)  # an adapter is two matrices
    return work.accumulation * passes + TENSOR_OPERATIONS * tensors


def _input(work: StepWork, hardware: HardwareRates) -> float:
    """Return the seconds of moving batches to the device."""
    each = work.computed * BATCH_BYTES / hardware.host.bandwidth + hardware.host.latency
    return work.accumulation * (1 + work.forwards_before) * each


def _host_waits(strategy: Strategy, hardware: HardwareRates) -> bool:
    """Return whether the host cannot run ahead, so that issuing operations adds to the computation."""
    # partition_parameters.py, _all_gather_sequential and _all_gather_dtype: each module's hook copies weights from the
    # host by a blocking .to(device) (an upper bound: gathers overlap).
    return hardware.cpu or strategy.parameters != "gpu"


def _optimizer(work: StepWork, strategy: Strategy, hardware: HardwareRates) -> float:
    updated = work.trainable / strategy.owners(hardware.ranks, hardware.ranks_per_node)
    if hardware.cpu or strategy.optimizer != "gpu":
        return updated / hardware.host_adamw * work.update_on_host
    return updated * (work.update_traffic + CLIPPING_BYTES) / hardware.memory_bandwidth


# Communication


def members(collective: Collective, hardware: HardwareRates) -> int:
    """Return the number of ranks in a collective."""
    of_scope = {"all": hardware.ranks, "node": hardware.ranks_per_node, "across": hardware.nodes}[collective.scope]
    return collective.ranks or of_scope


def sent_bytes(collective: Collective, hardware: HardwareRates) -> float:
    """Return the bytes that a rank sends in a ring of n ranks: (n-1)/n of the buffer, twice that for an all-reduce
    (arXiv 1910.02054, 7)."""
    ranks = members(collective, hardware)
    return (2 if collective.kind == REDUCE else 1) * collective.size * (ranks - 1) / ranks


def network_bytes(collective: Collective, hardware: HardwareRates) -> float:
    """Return the bytes that a node sends to others: a ring through several nodes enters and leaves each node once, and
    a tree of two nodes moves each byte once in each direction, which NCCL uses for them (NVIDIA/nccl#946)."""
    if collective.scope == "node" or hardware.nodes == 1:
        return 0.0
    if collective.kind == REDUCE and collective.scope == "all" and hardware.nodes == 2 and not hardware.cpu:
        return collective.size
    return sent_bytes(collective, hardware) * (hardware.ranks_per_node if collective.scope == "across" else 1)


def collective_seconds(collective: Collective, hardware: HardwareRates) -> tuple[float, float]:
    """Return the seconds on the links inside a node and on the network, 0 for the faster of the two."""
    inside = 0.0 if collective.scope == "across" else sent_bytes(collective, hardware) / hardware.node.bandwidth
    outside = network_bytes(collective, hardware) / hardware.network.bandwidth
    seconds = max(inside, outside) + collective.calls * _latency(collective, hardware)
    return (seconds, 0.0) if outside <= inside else (0.0, seconds)


def _latency(collective: Collective, hardware: HardwareRates) -> float:
    """Return the seconds of one call's hops (NCCL, src/graph/tuning.cc, ncclTopoTuneModel: nsteps, nInterSteps)."""
    hops = members(collective, hardware) - 1
    far = 0 if collective.scope == "node" else min(hops, hardware.nodes - 1)
    once = (hops - far) * hardware.node.latency + far * hardware.network.latency
    return (2 if collective.kind == REDUCE else 1) * once


def _communication(
    collectives: list[Collective], hardware: HardwareRates, free: Mapping[Behind, float]
) -> tuple[float, float, float]:
    """Return the seconds of communication inside nodes and between nodes, and those that overlap with computation, of
    which CONTENTION remains. `free`: the computation behind which each kind may hide, in seconds, its parts first."""
    node = network = all_hidden = 0.0
    for behind, seconds in free.items():
        of_kind = [each for each in collectives if each.behind == behind]
        pairs = [collective_seconds(each, hardware) for each in of_kind]
        inside, outside = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        after = sum(each.after * sum(pair) for each, pair in zip(of_kind, pairs, strict=True))
        # The passes are parts of the computation. On a CPU the rank itself moves the bytes.
        left = seconds - all_hidden if behind == "computation" else seconds
        hidden = 0.0 if hardware.cpu else min(inside + outside - after, left)
        shown = 1 - (1 - CONTENTION) * hidden / (inside + outside) if hidden else 1.0
        node, network, all_hidden = node + inside * shown, network + outside * shown, all_hidden + hidden
    return node, network, all_hidden


# Offload


def _offload(work: StepWork, strategy: Strategy, hardware: HardwareRates, forward: float, backward: float) -> float:
    moved = _optimizer_offload(work, strategy, hardware) + _parameter_offload(work, strategy, hardware)
    return moved + _activation_offload(work, hardware, forward, backward)


def _activation_offload(work: StepWork, hardware: HardwareRates, forward: float, backward: float) -> float:
    """Return the seconds that a step waits for the inputs of its layers, with `forward` and `backward` seconds of
    computation, in which they go to the host and come back (train/activation_offload.py)."""
    if not work.offloads_inputs:
        return 0.0
    one = work.computed * work.hidden * work.width / hardware.host.bandwidth + hardware.host.latency
    all_of_them = work.accumulation * work.layers * one
    # The last one to go is the first to come back, and nothing is computed meanwhile.
    first = work.accumulation * one
    return sum(max(first, all_of_them - computing) for computing in (forward, backward))


def _optimizer_offload(work: StepWork, strategy: Strategy, hardware: HardwareRates) -> float:
    if strategy.optimizer == "gpu":
        return 0.0
    share = work.trainable / strategy.owners(hardware.ranks, hardware.ranks_per_node)
    # stage_1_and_2.py, copy_grads_in_partition, and stage3.py, partition_grads: with accumulation, gradients go to the
    # host at every micro-step that reduces, and come back at the next one. At the end of the step they go as fp32, and
    # step() returns the weights.
    reducing = work.accumulation if strategy.stage >= 2 else 1
    # FSDP reduces at the last micro-step only, and copies the weights at their next use (_parameter_offload).
    if strategy.engine == "fsdp":
        return share * MASTER / hardware.host.bandwidth
    to_and_fro = (2 * reducing - 1) * work.width if work.accumulation > 1 else 0
    seconds = share * (to_and_fro + MASTER + work.width) / hardware.host.bandwidth
    if strategy.optimizer == "nvme":
        # stage3.py, _optimizer_states_and_gradient_swap_in and _out; all ranks of a node share the disk.
        states = share * (MASTER + work.update_states) * hardware.ranks_per_node
        seconds += states / hardware.disk.read + states / hardware.disk.write
    return seconds


def _parameter_offload(work: StepWork, strategy: Strategy, hardware: HardwareRates) -> float:
    if strategy.parameters == "gpu":
        return 0.0
    # A rank copies its shard to the GPU before each gather and waits for it (_host_waits), so there is no overlap.
    share = strategy.gathered(work) / strategy.owners(hardware.ranks, hardware.ranks_per_node) * work.width
    seconds = share / hardware.host.bandwidth
    if strategy.parameters == "nvme":
        # _ensure_availability_of_partitioned_params reads; stage3.py, _partitioned_params_swap_out writes trained ones.
        trained = work.trainable / hardware.ranks * work.width
        seconds += hardware.ranks_per_node * (share / hardware.disk.read + trained / hardware.disk.write)
    return seconds
