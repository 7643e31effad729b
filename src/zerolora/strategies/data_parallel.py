"""torch's DistributedDataParallel: every rank holds everything."""

from collections.abc import Iterator
from typing import ClassVar

from zerolora.strategies.buckets import Buckets
from zerolora.strategies.reasons import Reason
from zerolora.strategies.strategy import Conflict, Strategy, Target
from zerolora.strategies.traffic import REDUCE, Collective, StepWork
from zerolora.types import EngineName

SOURCE = "torch/nn/parallel/distributed.py"
FP32_BYTES = 4


def needs_loss_scaling(target: Target) -> Conflict | None:
    """Return the conflict of torch's own engines with fp16."""
    if target.precision == "fp16":
        return Conflict(
            "train.precision is fp16, which needs DeepSpeed's loss scaling", "write bf16, or a zero strategy"
        )
    return None


class DistributedDataParallel(Strategy):
    """A strategy of DistributedDataParallel."""

    engine: ClassVar[EngineName] = "ddp"

    def conflict(self, target: Target) -> Conflict | None:
        """Return why the strategy cannot run on a target, None if it can."""
        return needs_loss_scaling(target)

    def options(self, buckets: Buckets, target: Target) -> Iterator[Reason]:
        """Yield the arguments of DistributedDataParallel, each with its reason."""
        yield Reason("ddp.bucket_cap_mb", 25, "fp32 gradients reduced together, MiB: torch's default", SOURCE)
        yield Reason("ddp.gradient_as_bucket_view", True, "gradients lie in the buckets: no second copy", SOURCE)
        yield Reason(
            "ddp.static_graph",
            False,
            "only reentrant checkpointing needs it, and non-reentrant checkpointing fails with it",
            "pytorch#69060",
        )

    def collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        """Yield one reduction of the adapter's fp32 gradients: all micro-steps but the last are unsynchronised."""
        yield Collective("all_reduce gradients", REDUCE, "all", work.trainable * FP32_BYTES, 1)
