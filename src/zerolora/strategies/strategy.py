"""The interface of a strategy: what it shards and offloads, its collectives, requirements and rendered options."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from zerolora.errors import UserError
from zerolora.strategies.traffic import Collective, StepWork
from zerolora.types import Device, EngineName, Precision

Placement = Literal["gpu", "cpu", "nvme"]


class Reason(NamedTuple):
    """One value of a rendered config."""

    key: str
    """Path of the value, as in zero_optimization.offload_param.device."""
    value: Any
    reason: str
    """Why it has this value."""
    source: str
    """A file of DeepSpeed or torch, a paper, or a thread as in DeepSpeed#1234."""


def nested(reasons: Iterable[Reason]) -> dict[str, Any]:
    """Return the nested config that `reasons` list."""
    config: dict[str, Any] = {}
    for entry in reasons:
        *path, last = entry.key.split(".")
        section = config
        for name in path:
            section = section.setdefault(name, {})
        section[last] = entry.value
    return config


@dataclass(frozen=True)
class Buckets:
    """The size keys of zero_optimization, in elements; 0 where a strategy does not use one."""

    reduce: int = 0
    """reduce_bucket_size: gradients that are reduced together."""
    allgather: int = 0
    """allgather_bucket_size: updated weights that are gathered together (stages 1 and 2)."""
    prefetch: int = 0
    """stage3_prefetch_bucket_size: weights gathered ahead of their use."""
    persistence: int = 0
    """stage3_param_persistence_threshold: weights smaller than this are never sharded."""
    live: int = 0
    """stage3_max_live_parameters: the most gathered weights at a time."""
    overlap: bool = False
    """overlap_comm: reduce and gather during computation, at the price of a second bucket."""


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that its buckets depend on: its width, and numbers of parameters."""

    hidden: int
    trained: int
    layer: int
    """Of one layer."""
    largest: int
    """Of the largest module."""
    total: int
    """Of the base model."""


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
    """The method computes with unpacked weights of quantized modules outside of their forward pass."""
    frozen_type: str | None = None
    """The type of a quantized base model: nf4, fp4, int8, or None."""

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node


INT8_WHOLE = "train.quantization.type is int8, of which bitsandbytes keeps a whole copy on every rank"
"""Why int8 weights cannot be sharded (bitsandbytes/nn/modules.py, Linear8bitLt: state.CB)."""


class Conflict(NamedTuple):
    """Why a strategy cannot run on a target."""

    problem: str
    """The key and value in conflict, and why."""
    remedy: str
    """What to write instead."""


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """How model states are distributed over ranks, GPUs, hosts and disks.

    Two strategies of one engine are equal if their layout is equal; names and descriptions are not compared.
    """

    engine: ClassVar[EngineName]
    name: str = field(compare=False)
    """The name in render.strategy."""
    about: str = field(compare=False)
    """What it is, for the reference."""
    sharded: str = field(compare=False)
    """What is sharded or offloaded, for the table in docs/choice.md."""
    costs: str = field(compare=False)
    """What it costs, for the same table."""

    risk: str | None = field(default=None, compare=False)
    """Why the canary compares its first losses with a safe strategy's (planner/canary_setting.py), if it does."""

    stage: int
    """What is sharded: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP counts as 3)."""
    optimizer: Placement = "gpu"
    """Where fp32 master weights and Adam moments are kept."""
    parameters: Placement = "gpu"
    """Where a rank's shard of the weights is kept between uses (stage 3 only)."""
    within_node: bool = False
    """Weights are gathered inside a node only: hpZ keeps a second shard of them for the backward pass (arXiv
    2306.10209, 4.2), FSDP's hybrid sharding replicates them on every node."""
    quantized: bool = False
    """Weights are gathered as int8 with scales (qwZ, arXiv 2306.10209, 4.1); in fp16, frozen ones are stored so too."""

    def owners(self, ranks: int, ranks_per_node: int) -> int:
        """Return the number of ranks among which the optimizer states are sharded."""
        return ranks if self.stage else 1

    def conflict(self, target: Target) -> Conflict | None:
        """Return why the strategy cannot run on a target; None if it can."""
        return None

    def check(self, target: Target) -> None:
        """Raise UserError if the strategy cannot run on a target."""
        if conflict := self.conflict(target):
            raise UserError(f"render.strategy is {self.name}, and {conflict.problem}; {conflict.remedy}")

    def buckets(self, model: ModelSizes, on_gpu: bool) -> Buckets:
        """Return the bucket sizes for a model."""
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
