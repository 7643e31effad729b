"""The validation losses of a run: the best adapter so far, and whether training stops early."""

import math

import torch

from zerolora.config.settings import TrainSettings
from zerolora.errors import wording


class Validations:
    """The validation losses so far, and the adapter of the lowest."""

    def __init__(self, settings: TrainSettings) -> None:
        self.every, self.patience = settings.validation_steps, settings.patience
        self.stop_above = {bar.step: bar.loss for bar in settings.stop_above}
        self.keeps_best = settings.keep == "best" and self.every is not None
        self.losses: list[tuple[int, float]] = []
        """(step, loss per supervised token) of each validation."""
        self.best: dict[str, torch.Tensor] = {}
        """The fp32 adapter of the lowest, on rank 0; empty if the last one is published."""

    def due(self, step: int) -> bool:
        """Tell whether to validate after `step` steps."""
        return self.every is not None and step > 0 and step % self.every == 0 and not self.has(step)

    def has(self, step: int) -> bool:
        """Tell whether the state after `step` steps was validated."""
        return bool(self.losses) and self.losses[-1][0] == step

    def add(self, step: int, loss: float) -> bool:
        """Add a validation's loss and tell whether it is the lowest so far."""
        lowest = self.lowest[1] if self.losses else math.inf
        self.losses.append((step, loss))
        return loss < lowest

    @property
    def lowest(self) -> tuple[int, float]:
        """Step and loss of the best, the first of equal ones; NaN counts as infinite."""
        return min(self.losses, key=lambda each: (math.inf if math.isnan(each[1]) else each[1], each[0]))

    @property
    def exhausted(self) -> bool:
        """Whether none of the last `patience` validations was a new lowest."""
        if self.patience is None or not self.losses:
            return False
        return sum(step > self.lowest[0] for step, _ in self.losses) >= self.patience

    @property
    def above_bar(self) -> bool:
        """Whether the lowest loss is above what `stop_above` says of the step of the last validation."""
        if not self.losses:
            return False
        lowest = self.lowest[1]
        return (math.inf if math.isnan(lowest) else lowest) > self.stop_above.get(self.losses[-1][0], math.inf)

    def __str__(self) -> str:
        (step, loss), (best_step, lowest) = self.losses[-1], self.lowest
        if step == best_step:
            return wording(f"validation loss {loss:.4f}, the lowest so far")
        return wording(f"validation loss {loss:.4f}, the lowest was {lowest:.4f} at step {best_step}")

    def state(self) -> torch.Tensor:
        """Return the losses for a checkpoint: [validations, 2], fp64."""
        return torch.tensor(self.losses, dtype=torch.float64).reshape(-1, 2)

    def restore(self, state: torch.Tensor, best: dict[str, torch.Tensor]) -> None:
        """Take over what `state` returned, and the best adapter."""
        self.losses, self.best = [(int(step), loss) for step, loss in state.tolist()], best
