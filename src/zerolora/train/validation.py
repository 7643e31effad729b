"""The validations of a run: the best adapter so far, and early stopping."""

import math
from collections.abc import Sequence

import torch

from zerolora.config.settings import TrainSettings
from zerolora.errors import UserError
from zerolora.schedules import every
from zerolora.train.objectives import OBJECTIVES


class Validations:
    """Loss and metrics of the validations so far, and the adapter of the best."""

    def __init__(self, settings: TrainSettings, steps: int, sources: Sequence[str] = ()) -> None:
        """`steps`: those of the whole run; `sources`: the names of the data sources."""
        self.every = None if settings.validation_steps is None else every(settings.validation_steps, steps)
        self.patience = settings.patience
        self.stop_above = {bar.step: bar.loss for bar in settings.stop_above}
        self.keeps_best = settings.keep == "best" and self.every is not None
        self.objective = OBJECTIVES[settings.objective].of(settings)
        self.tasks = [task.name for task in settings.validation_tasks]
        self.sources = tuple(f"loss.{name}" for name in sources) if len(sources) > 1 else ()
        self.names = ("loss", *self.objective.metrics, *self.tasks, *self.sources)
        self.made: list[tuple[int, dict[str, float]]] = []
        """(step, {"loss": mean loss, metric: mean, task: accuracy, "loss.SOURCE": mean loss}) of each validation."""
        self.best: dict[str, torch.Tensor] = {}
        """The fp32 adapter of the best one, on rank 0; empty if the last adapter will be published."""

    def due(self, step: int) -> bool:
        """Return whether to validate after `step` steps."""
        return self.every is not None and step > 0 and step % self.every == 0 and not self.has(step)

    def has(self, step: int) -> bool:
        """Return whether the state after `step` steps was validated."""
        return bool(self.made) and self.made[-1][0] == step

    def add(self, step: int, figures: dict[str, float]) -> bool:
        """Add a validation's loss and metrics; return whether it is the best so far."""
        best = self._rank(self.best_of_all[1]) if self.made else math.inf
        self.made.append((step, figures))
        return self._rank(self.made[-1][1]) < best

    def of_sources(self, losses: Sequence[float]) -> dict[str, float]:
        """Return the losses of all sources as figures of a validation; empty for a single source."""
        return dict(zip(self.sources, losses, strict=True)) if self.sources else {}

    @property
    def best_of_all(self) -> tuple[int, dict[str, float]]:
        """Step and figures of the best one, the first of equal ones; NaN is the worst."""
        return min(self.made, key=lambda each: (self._rank(each[1]), each[0]))

    @property
    def published(self) -> tuple[int, dict[str, float]] | None:
        """Step and figures of the adapter to publish: the best one, or the last; None without validations."""
        if not self.made:
            return None
        return self.best_of_all if self.keeps_best else self.made[-1]

    def check(self) -> None:
        """Raise UserError if the validation loss of the adapter to publish is not finite. The training loss does not
        show it after a last step that diverged, as it is computed before that step."""
        step, figures = self.published or (0, {"loss": 0.0})
        if not math.isfinite(loss := figures["loss"]):
            raise UserError(f"validation loss is {loss} at step {step}; lower train.learning_rate")

    @property
    def exhausted(self) -> bool:
        """Whether none of the last `patience` validations was a new best."""
        if self.patience is None or not self.made:
            return False
        return sum(step > self.best_of_all[0] for step, _ in self.made) >= self.patience

    @property
    def above_bar(self) -> bool:
        """Whether the lowest loss is above the bar of `stop_above` for the last validated step."""
        if not self.made:
            return False
        lowest = min(math.inf if math.isnan(figures["loss"]) else figures["loss"] for _, figures in self.made)
        return lowest > self.stop_above.get(self.made[-1][0], math.inf)

    def __str__(self) -> str:
        name, extreme = self.objective.best, ("highest" if self.objective.highest else "lowest")
        (step, figures), (best_step, best) = self.made[-1], self.best_of_all
        tasks = "".join(f"; {task} {figures[task]:.3g}" for task in self.tasks)
        if step == best_step:
            return f"validation {name} {figures[name]:.4f}, the {extreme} so far{tasks}"
        was = f"the {extreme} was {best[name]:.4f} at step {best_step}"
        return f"validation {name} {figures[name]:.4f}, {was}{tasks}"

    def state(self) -> torch.Tensor:
        """Return step and figures of each validation, for a checkpoint: [validations, 1 + figures], fp64."""
        rows = [(step, *(figures[name] for name in self.names)) for step, figures in self.made]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 1 + len(self.names))

    def restore(self, state: torch.Tensor, best: dict[str, torch.Tensor]) -> None:
        """Restore the validations from `state`'s result, and the best adapter."""
        self.made = [(int(step), dict(zip(self.names, figures, strict=True))) for step, *figures in state.tolist()]
        self.best = best

    def _rank(self, figures: dict[str, float]) -> float:
        """Return a number that is lowest for the best."""
        value = figures[self.objective.best]
        return math.inf if math.isnan(value) else -value if self.objective.highest else value
