"""Adafactor (arXiv 1804.04235), transformers' own, with the learning rate of train.schedule.

Of a matrix it keeps the mean squares of rows and of columns only. torch.optim.Adafactor is not used: it scales each
step by the norm of the weight, which for LoRA's second factor is zero at the start, so that it would hardly be trained.
transformers' Trainer switches that off as well (trainer_optimizer.py, _get_adafactor).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerolora.optimizers.optimizer import FP32_BYTES, Optimizer
from zerolora.strategies.strategy import Conflict, Strategy, Target

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters

MATRIX = ("exp_avg_sq_row", "exp_avg_sq_col")  # as transformers/optimization.py names them
VECTOR = "exp_avg_sq"


class Adafactor(Optimizer):
    """transformers.Adafactor."""

    def conflict(self, strategy: Strategy, target: Target) -> Conflict | None:
        """Return the conflict with flat partitions and shards, of which rows and columns are not known."""
        if strategy.stage == 0:
            return None
        # One vector per rank: no factors, as many bytes as a moment of AdamW, and one clipping for all tensors.
        held = "shards" if strategy.engine == "fsdp" else "flat partitions"
        return Conflict(
            f"render.strategy is {strategy.name}, which holds trained weights as {held}, without the rows and columns "
            "that adafactor needs",
            "write strategy zero0 or ddp, or another optimizer",
        )

    def state_bytes(self, parameters: "TrainedParameters") -> float:
        """Return the bytes of the mean squares."""
        return float(FP32_BYTES * parameters.factored)

    def saved_bytes(self, parameters: "TrainedParameters") -> float:
        """Return the same bytes: they are fp32 in training as well."""
        return self.state_bytes(parameters)

    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        """Return the bytes of the squared gradient, then of the update, and of one copy of it."""
        return 2 * FP32_BYTES * largest

    def traffic(self, on_cpu: bool) -> float:
        """Return the bytes of its passes over a matrix, whose rows and columns are few beside it. Counted."""
        return 92.0

    def parts(self, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the states of a matrix, or of a vector."""
        return MATRIX if len(shape) > 1 else (VECTOR,)

    def build(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float] | None,
        epsilon: float | None,
    ) -> "torch.optim.Optimizer":
        """Return transformers' optimizer."""
        from transformers.optimization import Adafactor as Factored

        return Factored(groups, lr=learning_rate, weight_decay=weight_decay, scale_parameter=False, relative_step=False)

    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        """Create the states as the first step does, and set the number of updates."""
        import torch

        shape = tensor.shape
        sizes = {MATRIX[0]: shape[:-1], MATRIX[1]: (*shape[:-2], *shape[-1:]), VECTOR: shape}
        zeros = {name: torch.zeros(sizes[name], device=tensor.device) for name in self.parts(shape)}
        inner.state[tensor] = {"step": updates, **zeros, "RMS": 0}
