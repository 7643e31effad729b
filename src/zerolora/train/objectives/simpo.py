"""SimPO (arXiv 2405.14734): the chosen answer's mean log-probability shall exceed the rejected one's by a margin."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerolora.train.objectives.pairs import WITHOUT, Pairs, Side, of_pairs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class SimplePreference(Pairs):
    """A loss without a reference."""

    beta: float = 2.0
    gamma: float = 0.5

    def preference(self, chosen: Side, rejected: Side) -> "torch.Tensor":
        """Return the loss of each pair."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(self.reward(chosen) - self.reward(rejected) - self.gamma)

    def reward(self, answers: Side) -> "torch.Tensor":
        """Return beta times the mean log-probability of a token."""
        return self.beta * answers.mean_change


OBJECTIVE = SimplePreference(name="simpo", order=40, metrics=of_pairs(WITHOUT), learning_rate=5e-6).configured(
    {"sft_weight": 0.0}
)
