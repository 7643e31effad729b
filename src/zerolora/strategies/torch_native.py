"""Strategies of torch's own engines: DistributedDataParallel, and FSDP2 (`fully_shard`)."""

import math
from collections.abc import Iterator
from typing import ClassVar

from zerolora.conflict import Conflict
from zerolora.strategies.strategy import (
    GATHER,
    INT8_WHOLE,
    REDUCE,
    SCATTER,
    Buckets,
    Collective,
    Reason,
    Scope,
    StepWork,
    Strategy,
    Target,
)
from zerolora.types import EngineName

DDP = "torch/nn/parallel/distributed.py"
FSDP = "torch/distributed/fsdp/_fully_shard/_fully_shard.py"
FP32_BYTES = 4
BUCKET_MIB = 25
"""torch's default size of DDP's buckets."""


class TorchNative(Strategy):
    """A strategy without fp16: torch's engines have no loss scaling."""

    def conflict(self, target: Target) -> Conflict | None:
        if target.precision == "fp16":
            return Conflict(
                "train.precision is fp16, which needs DeepSpeed's loss scaling", "use bf16, or a zero strategy"
            )
        return None


class DistributedDataParallel(TorchNative):
    """A strategy of DistributedDataParallel: every rank holds everything."""

    engine: ClassVar[EngineName] = "ddp"

    def options(self, buckets: Buckets, target: Target) -> Iterator[Reason]:
        yield Reason("ddp.bucket_cap_mb", BUCKET_MIB, "fp32 gradients reduced together, MiB: torch's default", DDP)
        yield Reason("ddp.gradient_as_bucket_view", True, "gradients lie in the buckets: no second copy", DDP)
        yield Reason(
            "ddp.static_graph",
            False,
            "only reentrant checkpointing needs it, and non-reentrant checkpointing fails with it",
            "pytorch#69060",
        )

    def collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        """Yield one reduction of the adapter's fp32 gradients: all micro-steps but the last are unsynchronised. Buckets
        are reduced as soon as they are full (arXiv 2006.15704, 3.2.3)."""
        size = work.trainable * FP32_BYTES
        buckets = math.ceil(size / (BUCKET_MIB * 2**20))
        yield Collective("all_reduce gradients", REDUCE, "all", size, buckets, "last_backward", 1 / buckets)


class FullyShard(TorchNative):
    """A strategy of `fully_shard`."""

    engine: ClassVar[EngineName] = "fsdp"

    def owners(self, ranks: int, ranks_per_node: int) -> int:
        """Return the number of ranks among which states are sharded: hybrid sharding replicates them on each node."""
        return ranks_per_node if self.within_node else ranks

    def conflict(self, target: Target) -> Conflict | None:
        if target.frozen_type == "int8":
            return Conflict(INT8_WHOLE, "set type: nf4, or strategy ddp")
        return super().conflict(target)

    def options(self, buckets: Buckets, target: Target) -> Iterator[Reason]:
        mesh, why = [target.ranks], "sharded among all ranks"
        if self.within_node:
            mesh, why = [target.nodes, target.ranks_per_node], "nodes x ranks of a node: sharded inside a node only"
        yield Reason("fsdp.mesh", mesh, why, FSDP)
        yield Reason(
            "fsdp.reshard_after_forward",
            True,
            "a layer's weights are freed after use and gathered again for the backward pass",
            FSDP,
        )
        yield Reason(
            "fsdp.param_dtype",
            target.precision,
            "adapter weights are kept in fp32 and gathered in this; a unit's trained weights must be of one dtype",
            "accelerate#3985",
        )
        where = "on the host between uses, pinned where there is a GPU" if self.offloads else "on the device"
        yield Reason(
            "fsdp.offload",
            self.offloads,
            f"shards, gradients and optimizer are {where}",
            "torch/distributed/fsdp/_fully_shard/_fsdp_api.py, CPUOffloadPolicy",
        )
        yield Reason("fsdp.reduce_dtype", "fp32", "the adapter's gradients are small, so fp32 costs little", FSDP)

    def collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        """Yield a gather for each pass of each layer, and one reduction of the adapter's fp32 gradients."""
        # fully_shard on each layer, reshard_after_forward: a gather forward and one backward. Weights outside the
        # layers stay gathered between the two: the root's reshard_after_forward is False by default. Counted.
        scope: Scope = "node" if self.within_node else "all"
        units = work.layers + 1
        # train/engines/: gradients are reduced in fp32, at the last micro-step only.
        gradients = work.trainable * FP32_BYTES
        gathers = work.accumulation * ((2 + work.forwards_before) * units - 1)
        yield Collective("all_gather weights", GATHER, scope, self.gathered(work) * work.width, gathers, "computation")
        last = 1 / units
        yield Collective("reduce_scatter gradients", SCATTER, scope, gradients, units, "last_backward", last)
        if self.within_node:
            shard = gradients / ranks_per_node
            yield Collective("all_reduce gradients", REDUCE, "across", shard, units, "last_backward", last)

    def gathered(self, work: StepWork) -> float:
        """Return the number of parameters gathered in one step: twice in a micro-step, once outside the layers."""
        passes = 2 + work.forwards_before
        return work.accumulation * (passes * (work.frozen + work.trainable) - work.outside)
