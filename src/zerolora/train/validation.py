"""What validation finds while training goes on: the best adapter so far, and whether to go on at all."""

import math
from typing import Any

import torch


class Validations:
    """The validation losses so far, and the adapter of the lowest."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.every, self.patience = settings["validation_steps"], settings["patience"]
        self.keeps_best = settings["keep"] == "best" and self.every is not None
        self.found: list[tuple[int, float]] = []
        """Step and loss per supervised token of each."""
        self.best: dict[str, torch.Tensor] = {}
        """The fp32 adapter of the lowest, on rank 0; empty if the last one is published."""

    def due(self, step: int) -> bool:
        """Tell whether to validate after `step` steps."""
        return self.every is not None and step > 0 and step % self.every == 0 and not self.has(step)

    def has(self, step: int) -> bool:
        """Tell whether the state after `step` steps was validated."""
        return bool(self.found) and self.found[-1][0] == step

    def note(self, step: int, loss: float) -> bool:
        """Take a validation's loss and tell whether it is the lowest so far."""
        lowest = self.lowest[1] if self.found else math.inf
        self.found.append((step, loss))
        return loss < lowest

    @property
    def lowest(self) -> tuple[int, float]:
        """Step and loss of the best, the first of equal ones; a loss that is no number is none."""
        return min(self.found, key=lambda each: (math.inf if math.isnan(each[1]) else each[1], each[0]))

    @property
    def exhausted(self) -> bool:
        """Whether the last `patience` validations were none the better."""
        if self.patience is None or not self.found:
            return False
        return sum(step > self.lowest[0] for step, _ in self.found) >= self.patience

    def __str__(self) -> str:
        step, loss = self.found[-1]
        lowest = "the lowest so far" if self.lowest[0] == step else f"the lowest was {self.lowest[1]:.4f}"
        return f"validation loss {loss:.4f}, {lowest}" + (
            "" if self.lowest[0] == step else f" at step {self.lowest[0]}"
        )

    def state(self) -> torch.Tensor:
        """Return what was found, for a checkpoint: [validations, 2], fp64."""
        return torch.tensor(self.found, dtype=torch.float64).reshape(-1, 2)

    def restore(self, state: torch.Tensor, best: dict[str, torch.Tensor]) -> None:
        """Take up what `state` returned, and the best adapter."""
        self.found, self.best = [(int(step), loss) for step, loss in state.tolist()], best
