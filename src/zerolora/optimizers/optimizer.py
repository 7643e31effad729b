"""The interface of an optimizer: its states and their bytes, its conflicts, and how it is built."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.config.section import Fault
from zerolora.conflict import Conflict
from zerolora.errors import shown

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters
    from zerolora.strategies.strategy import Strategy, Target

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """An optimizer of `train.optimizer`."""

    dtensors: ClassVar[bool] = False
    """It can update FSDP's DTensors; others get each rank's shards as plain tensors."""
    states_as_weights: ClassVar[bool] = False
    """Its states have the type of the weights that it updates; those of others have types of their own."""

    name: str
    """The name in train.optimizer."""
    about: str = field(compare=False)
    """Description for the reference."""
    built: str
    """Its class, for the table in docs/methods.md."""
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """Names of its states, in the library and in checkpoints, which hold them as fp32 tensors."""
    betas: tuple[float, float] | None = (0.9, 0.999)
    """Default of train.betas, if it has any."""
    epsilon: float | None = 1e-8
    """Default of train.epsilon, if it has one."""
    host_time: float = field(default=1.0, compare=False)
    """Time of a step on one thread of a CPU, relative to AdamW's with as many parameters. Measured
    (benchmarks/train/host_optimizers.py)."""
    cost: str = field(compare=False)
    """Bytes of its states for each trained parameter, for the same table."""
    where: str = field(compare=False)
    """Where it works, for the same table."""

    def conflict(self, strategy: "Strategy", target: "Target") -> Conflict | None:
        """Return why it cannot run under a strategy on a target; None if it can."""
        return None

    def faults(self, betas: Sequence[float] | None, epsilon: float | None) -> Iterator[Fault]:
        """Yield values of the config's keys of these names that the optimizer does not have."""
        if betas is not None and self.betas is None:
            yield ("betas",), f"{shown(betas)}, but {self.name} has none; remove it"
        if epsilon is not None and self.epsilon is None:
            yield ("epsilon",), f"{shown(epsilon)}, but {self.name} has none; remove it"

    @abstractmethod
    def state_bytes(self, parameters: "TrainedParameters") -> float:
        """Return the bytes of its states for all trained parameters, unsharded."""

    def saved_bytes(self, parameters: "TrainedParameters") -> float:
        """Return the bytes of its states in a checkpoint, in fp32."""
        return float(FP32_BYTES * len(self.states) * parameters.trained)

    @abstractmethod
    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        """Return the bytes that a step allocates and frees for `elements` parameters, in tensors up to `largest`."""

    @abstractmethod
    def traffic(self) -> float:
        """Return the bytes that a step on a GPU reads and writes for each trained parameter, with fp32 weight and
        gradient."""

    def unpacked_bytes(self, elements: float) -> float:
        """Return the bytes that `unpacked` allocates for one state of `elements` parameters."""
        return 0.0

    def build(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float] | None,
        epsilon: float | None,
        on_host: bool,
    ) -> "torch.optim.Optimizer":
        """Return the library's optimizer of parameter groups; betas and epsilon are None where it has none.

        `on_host`: it will update tensors on the host. The groups may still have others, which an engine replaces.
        """
        options: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay}
        options |= {name: value for name, value in (("betas", betas), ("eps", epsilon)) if value is not None}
        return self.create(groups, on_host, **options)

    @abstractmethod
    def create(self, groups: list[dict[str, Any]], on_host: bool, **options: Any) -> "torch.optim.Optimizer":
        """Return the library's optimizer, as `build`; options: lr, weight_decay and, if it has them, betas and eps."""

    @abstractmethod
    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        """Reset a tensor's state, in place if it exists, to that before the first step, but with `updates` updates."""

    def parts(self, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the states of a parameter of this shape."""
        return self.states

    @contextlib.contextmanager
    def unpacked(self, inner: "torch.optim.Optimizer", parts: Sequence[str], write: bool = False) -> Iterator[None]:
        """Provide states as fp32 tensors by name in `inner.state`; with `write`, write changes back at the end."""
        yield
