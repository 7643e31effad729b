"""The sizes that DeepSpeed leaves to its config: buckets, prefetch, persistence, live parameters. In elements."""

from dataclasses import dataclass

from zerolora.strategies import Strategy

# Below this a collective's time is mostly latency: at 10 GB/s and 20 us, 5e6 elements of 2 bytes are 1 ms.
SMALLEST_BUCKET = 5_000_000
LARGEST_BUCKET = 200_000_000


@dataclass(frozen=True)
class Buckets:
    """What zero_optimization's size keys say, in elements. A size that a strategy does not use is 0."""

    reduce: int = 0
    """reduce_bucket_size: gradients that are reduced together."""
    allgather: int = 0
    """allgather_bucket_size: updated weights that are gathered together (stages 1 and 2)."""
    prefetch: int = 0
    """stage3_prefetch_bucket_size: weights gathered ahead of their use."""
    persistence: int = 0
    """stage3_param_persistence_threshold: weights smaller than this are never shared out."""
    live: int = 0
    """stage3_max_live_parameters: gathered weights that may be there at a time."""
    overlap: bool = False
    """overlap_comm: reduce and gather beside computing, at the price of a second bucket."""


def buckets(
    strategy: Strategy, hidden: int, trained: int, layer: int, largest: int, parameters: int, on_gpu: bool
) -> Buckets:
    """Return the sizes for a model.

    `layer` and `largest` are the parameters of one layer and of the largest module, `trained` the trained ones.
    """
    if strategy.engine != "deepspeed" or strategy.stage == 0:
        return Buckets()
    # A bucket larger than all gradients is memory that nothing uses.
    reduce = max(1, min(trained, LARGEST_BUCKET if trained > LARGEST_BUCKET else max(SMALLEST_BUCKET, trained)))
    if strategy.stage < 3:
        return Buckets(reduce=reduce, allgather=reduce)
    return Buckets(
        reduce=min(reduce, max(hidden * hidden, SMALLEST_BUCKET)),
        # One layer ahead: its gathering takes as long as the computing of the one before.
        prefetch=min(layer, LARGEST_BUCKET),
        # Norms and biases: their gathering is all latency. Adapters of a small rank stay whole too.
        persistence=10 * hidden,
        # The layer at work, the one ahead, and the largest module (the embedding or the head).
        live=min(parameters, 2 * layer + largest),
        overlap=on_gpu,
    )
