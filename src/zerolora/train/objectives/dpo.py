"""DPO (arXiv 2305.18290): the chosen answer's log-probability shall rise by more than the rejected one's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerolora.train.objectives.pairs import REFERENCES, WITH_REFERENCE, Pairs, Side, of_pairs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class DirectPreference(Pairs):
    """DPO and its variants; config/objective_sections.py has their formulas."""

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def preference(self, chosen: Side, rejected: Side) -> "torch.Tensor":
        """Return the loss of each pair."""
        from torch.nn.functional import logsigmoid

        margin = self.reward(chosen) - self.reward(rejected)
        match self.loss:
            case "robust":
                wrong = self.label_smoothing
                return ((wrong - 1) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)
            case "hinge":
                return (1 - margin).relu()
        return -logsigmoid(margin)

    def reward(self, answers: Side) -> "torch.Tensor":
        """Return beta times the change of the log-probability, or of its mean over tokens."""
        return self.beta * (answers.mean_change if self.loss == "length_normalized" else answers.change)


OBJECTIVE = DirectPreference(
    name="dpo",
    order=20,
    reference=True,
    numbers=REFERENCES,
    metrics=of_pairs(WITH_REFERENCE),
    learning_rate=5e-6,
)
