"""The interface of a strategy: what it shards and offloads, its collectives, requirements and rendered options."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from zerolora.errors import UserError
from zerolora.strategies.buckets import Buckets, ModelSizes
from zerolora.strategies.reasons import Reason
from zerolora.strategies.traffic import Collective, StepWork
from zerolora.types import Device, EngineName, Precision

Placement = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The hardware and settings that a strategy must support."""

    device: Device
    precision: Precision
    nodes: int
    ranks_per_node: int
    nvme: str | None
    """Directory on a local disk for offloaded states."""
    unpacks: bool = False
    """The method computes with the unpacked weights of quantized modules, outside of their forward pass."""
    frozen_type: str | None = None
    """The type that the frozen base model is quantized to: nf4, fp4, int8, or None."""

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node


INT8_WHOLE = "train.quantization.type is int8, of which bitsandbytes keeps a whole copy on every rank"
"""Why int8 does not go with sharded weights (bitsandbytes/nn/modules.py, Linear8bitLt: state.CB)."""


class Conflict(NamedTuple):
    """Why a strategy cannot run on a target."""

    problem: str
    """The key and value that it cannot run with, and why."""
    remedy: str
    """What to write instead."""


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """How model states are distributed over ranks, GPUs, hosts and disks.

    Two strategies of one engine are equal if their layout is equal; names and descriptions are not compared.
    """

    engine: ClassVar[EngineName]
    """The engine: DeepSpeed, torch's DistributedDataParallel, or torch's fully_shard (FSDP2)."""

    name: str = field(compare=False)
    """The name in render.strategy."""
    about: str = field(compare=False)
    """What it is, for the reference."""
    sharded: str = field(compare=False)
    """What is sharded or offloaded, for the table in docs/choice.md."""
    costs: str = field(compare=False)
    """What it costs, for the same table."""

    risk: str | None = field(default=None, compare=False)
    """Why the first losses of a run are compared with those of a safe strategy (planner/choice.py); None if it
    is safe itself."""

    stage: int
    """What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP counts as 3)."""
    optimizer: Placement = "gpu"
    """Where fp32 master weights and Adam moments are kept."""
    parameters: Placement = "gpu"
    """Where a rank's shard of the weights is kept between uses (stage 3 only)."""
    within_node: bool = False
    """Weights are gathered inside a node only: DeepSpeed's hpZ keeps a second shard of them for the backward pass
    (arXiv 2306.10209, 4.2), FSDP's hybrid sharding shards inside a node and replicates on every node."""
    quantized: bool = False
    """Weights are gathered as int8 with scales (qwZ, arXiv 2306.10209, 4.1); in fp16 frozen weights are stored as int8
    as well."""

    def owners(self, ranks: int, ranks_per_node: int) -> int:
        """Return the number of ranks among which the optimizer states are sharded."""
        return ranks if self.stage else 1

    def conflict(self, target: Target) -> Conflict | None:
        """Return why the strategy cannot run on a target, None if it can."""
        return None

    def check(self, target: Target) -> None:
        """Raise UserError if the strategy cannot run on a target."""
        if conflict := self.conflict(target):
            raise UserError(f"render.strategy is {self.name}, and {conflict.problem}; {conflict.remedy}")

    def buckets(self, model: ModelSizes, on_gpu: bool) -> Buckets:
        """Return the bucket sizes for a model; all 0 for an engine without buckets."""
        return Buckets()

    @abstractmethod
    def options(self, buckets: Buckets, target: Target) -> Iterable[Reason]:
        """Yield the engine's options, each with its reason."""

    @abstractmethod
    def collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        """Yield the collectives of one optimizer step."""

    def host_operations(self, work: StepWork) -> float:
        """Return the host work that the engine adds to a micro-step, in operations of the model."""
        return 0.0

    def gathered(self, work: StepWork) -> float:
        """Return the number of parameters gathered in one step over all micro-steps, counting every gather."""
        return 0.0

    @property
    def offloads(self) -> bool:
        """Whether any state leaves the GPU."""
        return (self.optimizer, self.parameters) != ("gpu", "gpu")

    @property
    def on_disk(self) -> bool:
        """Whether any state is kept on disk."""
        return "nvme" in (self.optimizer, self.parameters)
