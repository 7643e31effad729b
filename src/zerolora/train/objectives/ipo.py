"""IPO (arXiv 2310.12036): as DPO, but with a margin that training aims at, so that certain pairs do not diverge."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerolora.train.objectives.pairs import REFERENCES, WITH_REFERENCE, Pairs, Side, of_pairs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class IdentityPreference(Pairs):
    """The squared distance of the margin from 1 / (2 beta), per token as in TRL, whose authors asked those of IPO."""

    beta: float = 0.1

    def preference(self, chosen: Side, rejected: Side) -> "torch.Tensor":
        """Return the loss of each pair."""
        return (self.reward(chosen) - self.reward(rejected) - 1 / (2 * self.beta)).square()

    def reward(self, answers: Side) -> "torch.Tensor":
        """Return the change of a token's log-probability."""
        return answers.mean_change


OBJECTIVE = IdentityPreference(
    name="ipo",
    order=30,
    reference=True,
    numbers=REFERENCES,
    metrics=of_pairs(WITH_REFERENCE),
    learning_rate=5e-6,
).configured({"sft_weight": 0.0})
