"""AdamW (arXiv 1711.05101), torch's own: the default."""

from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.optimizers.optimizer import FP32_BYTES, Optimizer

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters


class AdamW(Optimizer):
    """torch.optim.AdamW."""

    dtensors: ClassVar[bool] = True

    def state_bytes(self, parameters: "TrainedParameters") -> float:
        """Return the bytes of two fp32 moments."""
        return float(2 * FP32_BYTES * parameters.trained)

    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        """Return the bytes of the square roots of the second moment: with foreach, of all tensors at once."""
        return FP32_BYTES * elements

    def traffic(self, on_cpu: bool) -> float:
        """Return the bytes of its eight passes, which are the same with foreach and without. Counted."""
        return 80.0

    def build(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float] | None,
        epsilon: float | None,
    ) -> "torch.optim.Optimizer":
        """Return torch's optimizer."""
        import torch

        assert betas is not None and epsilon is not None
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, weight_decay=weight_decay)

    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        """Create the moments as the first step does, or set them to zero, and set the number of updates."""
        from zerolora.compat.torch_patches import fresh_state

        state = inner.state[tensor]
        if not state:
            state.update(fresh_state(tensor, updates))
        for name in self.states:
            state[name].zero_()
        state["step"].fill_(updates)
