"""What every strategy has: which model states it shards and offloads, what it sends, needs and renders."""

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
    """What a strategy is to run on."""

    device: Device
    precision: Precision
    nodes: int
    ranks_per_node: int
    nvme: str | None
    """Directory on a local disk that states may move to."""

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node


class Conflict(NamedTuple):
    """Why a strategy cannot run on a target."""

    problem: str
    """The key and the value that it cannot run with, and why."""
    remedy: str
    """What to write instead."""


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """How model states are laid out among the ranks, GPUs, hosts and disks.

    Two strategies of one engine are equal if their layout is: what names and describes them is not compared.
    """

    engine: ClassVar[EngineName]
    """What trains: DeepSpeed, torch's DistributedDataParallel, or torch's fully_shard (FSDP2)."""

    name: str = field(compare=False)
    """As in render.strategy."""
    order: int = field(compare=False)
    """Place in tables. Of strategies that are equally fast, the one with the lowest is chosen: list what shards or
    moves less first."""
    sharded: str = field(compare=False)
    """What is sharded or offloaded, for the table in docs/choice.md."""
    costs: str = field(compare=False)
    """What that costs, for the same table."""

    stage: int
    """What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP counts as 3)."""
    optimizer: Placement = "gpu"
    """Where fp32 master weights and Adam moments lie."""
    parameters: Placement = "gpu"
    """Where a rank's shard of the weights lies between uses (stage 3 only)."""
    within_node: bool = False
    """Weights are gathered inside a node only: DeepSpeed's hpZ keeps a second shard of them for the backward pass
    (arXiv 2306.10209, 4.2), FSDP's hybrid sharding shards inside a node and replicates on every node."""
    quantized: bool = False
    """Weights are gathered as int8 with scales (qwZ, arXiv 2306.10209, 4.1); in fp16 frozen weights are kept so."""

    def owners(self, ranks: int, ranks_per_node: int) -> int:
        """Return among how many ranks the optimizer states are sharded."""
        return ranks if self.stage else 1

    def conflict(self, target: Target) -> Conflict | None:
        """Return why the strategy cannot run on a target, None if it can."""
        return None

    def check(self, target: Target) -> None:
        """Raise UserError if the strategy cannot run on a target."""
        if conflict := self.conflict(target):
            raise UserError(f"render.strategy is {self.name}, and {conflict.problem}; {conflict.remedy}")

    def buckets(self, model: ModelSizes, on_gpu: bool) -> Buckets:
        """Return the sizes that are rendered for a model; all 0 for an engine without such sizes."""
        return Buckets()

    @abstractmethod
    def options(self, buckets: Buckets, target: Target) -> Iterable[Reason]:
        """Yield the engine's options, each with its reason."""

    @abstractmethod
    def collectives(self, work: StepWork, ranks_per_node: int) -> Iterator[Collective]:
        """Yield the collectives of one optimizer step."""

    def host_operations(self, work: StepWork) -> float:
        """Return what the engine adds to a micro-step's work on the host, in operations of the model."""
        return 0.0

    def gathered(self, work: StepWork) -> float:
        """Return the parameters that are gathered in one step of all micro-steps, each time counted."""
        return 0.0

    @property
    def offloads(self) -> bool:
        """Whether any state leaves the GPU."""
        return (self.optimizer, self.parameters) != ("gpu", "gpu")

    @property
    def on_disk(self) -> bool:
        """Whether any state lies on disk."""
        return "nvme" in (self.optimizer, self.parameters)
