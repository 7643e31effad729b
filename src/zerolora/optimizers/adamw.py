"""AdamW (arXiv 1711.05101) from torch: the default."""

from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.optimizers.optimizer import FP32_BYTES, Optimizer

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters


class AdamW(Optimizer):
    """torch.optim.AdamW."""

    dtensors: ClassVar[bool] = True
    states_as_weights: ClassVar[bool] = True

    def state_bytes(self, parameters: "TrainedParameters") -> float:
        return float(2 * FP32_BYTES * parameters.trained)

    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        # The square roots of the second moment, with foreach of all tensors at once; the fused kernel has none.
        return 0.0 if on_cpu else FP32_BYTES * elements

    def traffic(self) -> float:
        return 80.0  # counted: eight passes

    def create(self, groups: list[dict[str, Any]], on_host: bool, **options: Any) -> "torch.optim.Optimizer":
        import torch

        # One pass over the host's memory instead of eight. On a GPU torch's own choice, foreach.
        return torch.optim.AdamW(groups, **options, fused=True if on_host else None)

    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        from zerolora.compat.torch_patches import fresh_state

        state = inner.state[tensor]
        if not state:
            state.update(fresh_state(tensor, updates, fused=bool(inner.defaults["fused"])))
        for name in self.states:
            state[name].zero_()
        state["step"].fill_(updates)
