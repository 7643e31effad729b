"""The sizes in DeepSpeed's config: buckets, prefetch, persistence, live parameters. In elements."""

from dataclasses import dataclass

# Below this a collective's time is mostly latency: at 10 GB/s and 20 us, 5e6 elements of 2 bytes are 1 ms.
SMALLEST_BUCKET = 5_000_000
LARGEST_BUCKET = 200_000_000
ALIGNMENT = 2  # elements


@dataclass(frozen=True)
class Buckets:
    """The size keys of zero_optimization, in elements. A size that a strategy does not use is 0."""

    reduce: int = 0
    """reduce_bucket_size: gradients that are reduced together."""
    allgather: int = 0
    """allgather_bucket_size: updated weights that are gathered together (stages 1 and 2)."""
    prefetch: int = 0
    """stage3_prefetch_bucket_size: weights gathered ahead of their use."""
    persistence: int = 0
    """stage3_param_persistence_threshold: weights smaller than this are never sharded."""
    live: int = 0
    """stage3_max_live_parameters: the most gathered weights held at a time."""
    overlap: bool = False
    """overlap_comm: reduce and gather during computation, at the price of a second bucket."""


@dataclass(frozen=True)
class ModelSizes:
    """The model's sizes that bucket sizes depend on, in parameters."""

    hidden: int
    """Width of the model."""
    trained: int
    """All trained parameters."""
    layer: int
    """One layer."""
    largest: int
    """The largest module."""
    total: int
    """The base model."""


def deepspeed_buckets(stage: int, model: ModelSizes, on_gpu: bool) -> Buckets:
    """Return the bucket sizes for a model under one of DeepSpeed's stages."""
    if stage == 0:
        return Buckets()
    # A bucket larger than all gradients would be unused memory.
    reduce = max(1, min(model.trained, LARGEST_BUCKET))
    if stage < 3:
        # DeepSpeed aligns what it gathers to 4 bytes (stage_1_and_2.py, nccl_start_alignment_factor).
        return Buckets(reduce=reduce, allgather=reduce + reduce % ALIGNMENT)
    return Buckets(
        reduce=min(reduce, max(model.hidden * model.hidden, SMALLEST_BUCKET)),
        # Prefetch one layer: gathering it takes as long as computing the one before.
        prefetch=min(model.layer, LARGEST_BUCKET),
        # Norms, biases and adapters of a small rank stay gathered, since gathering them would be all latency.
        persistence=10 * model.hidden,
        # The layer in use, the next one, and the largest module (the embedding or the head).
        live=min(model.total, 2 * model.layer + model.largest),
        overlap=on_gpu,
    )
