"""AdamW of torchao with moments of 8 or 4 bits, which takes any torch device."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolora.conflict import Conflict
from zerolora.optimizers.optimizer import FP32_BYTES, Optimizer

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters
    from zerolora.strategies.strategy import Strategy, Target

BLOCK = 256  # elements that share an fp32 scale (low_bits.py)
PIECE = 2**22  # elements updated at once (low_bits.py)


@dataclass(frozen=True, kw_only=True)
class TorchaoAdamW(Optimizer):
    """torchao's AdamW8bit or AdamW4bit."""

    bits: int
    """Bits of an element of a moment."""
    moved: float
    """Bytes that the operations of a step read and write for each parameter: counted."""
    temporary: float
    """Bytes that a step allocates for each element of a piece: counted."""

    def conflict(self, strategy: "Strategy", target: "Target") -> Conflict | None:
        if strategy.optimizer == "nvme":
            return Conflict(
                f"render.strategy is {strategy.name}, which swaps torch's AdamW only",
                "use adamw, or strategy zero3_offload",
            )
        return None

    def state_bytes(self, parameters: "TrainedParameters") -> float:
        return len(self.states) * (self.bits / 8 + FP32_BYTES / BLOCK) * parameters.trained

    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        return self.temporary * min(largest, PIECE)

    def traffic(self) -> float:
        return self.moved

    def unpacked_bytes(self, elements: float) -> float:
        return FP32_BYTES * elements

    def create(self, groups: list[dict[str, Any]], on_host: bool, **options: Any) -> "torch.optim.Optimizer":
        from zerolora.optimizers.low_bits import low_bit_adamw

        optimizer = low_bit_adamw(self.bits)(groups, **options)
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"])  # torchao makes it a tensor, for its compiled step
        return optimizer

    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        from zerolora.optimizers.low_bits import start

        start(inner.state[tensor], tensor, self.bits, updates)

    @contextlib.contextmanager
    def unpacked(self, inner: "torch.optim.Optimizer", parts: Sequence[str], write: bool = False) -> Iterator[None]:
        from zerolora.optimizers.low_bits import decoded, encode

        packed = [
            (state, name, tensor.shape)
            for tensor, state in inner.state.items()
            for name in self.states
            if name in parts and f"{name}_codes" in state
        ]
        for state, name, shape in packed:
            state[name] = decoded(state, name, shape, self.bits)
        try:
            yield
        finally:
            for state, name, _ in packed:
                value = state.pop(name)
                if write:
                    encode(state, name, value, self.bits)
