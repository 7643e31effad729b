"""AdamW (arXiv 1711.05101) from torch: the default."""

from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.optimizers.optimizer import FP32_BYTES, Optimizer

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters


class AdamW(Optimizer):
    """torch.optim.AdamW."""

    dtensors: ClassVar[bool] = True

    def state_bytes(self, parameters: "TrainedParameters") -> float:
        return float(2 * FP32_BYTES * parameters.trained)

    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        # The square roots of the second moment: with foreach, of all tensors at once.
        return FP32_BYTES * elements

    def traffic(self, on_cpu: bool) -> float:
        return 80.0  # counted: eight passes, the same with foreach and without

    def build(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float] | None,
        epsilon: float | None,
    ) -> "torch.optim.Optimizer":
        import torch

        assert betas is not None and epsilon is not None
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, weight_decay=weight_decay)

    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        from zerolora.compat.torch_patches import fresh_state

        state = inner.state[tensor]
        if not state:
            state.update(fresh_state(tensor, updates))
        for name in self.states:
            state[name].zero_()
        state["step"].fill_(updates)
