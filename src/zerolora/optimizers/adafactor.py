"""Adafactor (arXiv 1804.04235) from transformers, with the learning rate of train.schedule.

Its states for a matrix are the mean squares of rows and of columns. torch.optim.Adafactor scales each step by the norm
of the weight, so it would hardly train LoRA's second factor, which starts at zero; transformers' Trainer switches that
off as well (trainer_optimizer.py, _get_adafactor).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerolora.conflict import Conflict
from zerolora.optimizers.optimizer import FP32_BYTES, Optimizer

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters
    from zerolora.strategies.strategy import Strategy, Target

MATRIX = ("exp_avg_sq_row", "exp_avg_sq_col")  # as transformers/optimization.py names them
VECTOR = "exp_avg_sq"


class Adafactor(Optimizer):
    """transformers.Adafactor."""

    def conflict(self, strategy: "Strategy", target: "Target") -> Conflict | None:
        if strategy.stage == 0:
            return None
        # A vector per rank has no rows and columns: as many bytes as AdamW's moment, one clipping for all tensors.
        held = "shards" if strategy.engine == "fsdp" else "flat partitions"
        return Conflict(
            f"render.strategy is {strategy.name}, which holds trained weights as {held}, without the rows and columns "
            "that adafactor needs",
            "use strategy zero0 or ddp, or another optimizer",
        )

    def state_bytes(self, parameters: "TrainedParameters") -> float:
        return float(FP32_BYTES * parameters.factored)

    def saved_bytes(self, parameters: "TrainedParameters") -> float:
        return self.state_bytes(parameters)  # fp32 in training as well

    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        return 2 * FP32_BYTES * largest  # the squared gradient, then the update, and one copy

    def traffic(self) -> float:
        return 92.0  # counted for a matrix, beside which rows and columns are few

    def parts(self, shape: Sequence[int]) -> tuple[str, ...]:
        return MATRIX if len(shape) > 1 else (VECTOR,)

    def create(self, groups: list[dict[str, Any]], on_host: bool, **options: Any) -> "torch.optim.Optimizer":
        from transformers.optimization import Adafactor as Factored

        return Factored(groups, **options, scale_parameter=False, relative_step=False)

    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        import torch

        shape = tensor.shape
        sizes = {MATRIX[0]: shape[:-1], MATRIX[1]: (*shape[:-2], *shape[-1:]), VECTOR: shape}
        zeros = {name: torch.zeros(sizes[name], device=tensor.device) for name in self.parts(shape)}
        inner.state[tensor] = {"step": updates, **zeros, "RMS": 0}
