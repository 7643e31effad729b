"""ORPO (arXiv 2403.07691): supervised fine-tuning on the chosen answers, plus the odds of both answers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from zerolora.train.objectives.objective import MARK, Sequence, token_counts
from zerolora.train.objectives.pairs import WITHOUT, Pairs, Side, of_pairs

if TYPE_CHECKING:
    import numpy as np
    import torch

CHOSEN_TEXT = "chosen_predicted"
"""Derived column: the tokens of prompt and chosen answer that are predicted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OddsRatio(Pairs):
    """A loss without a reference. With `prompt_loss`, losses of the prompt before a chosen answer are in the SFT term
    and in no other."""

    beta: float = 0.1
    prompt_loss: bool = False

    def configured(self, settings: Mapping[str, Any]) -> Self:
        """Return the objective with some settings."""
        result = super().configured(settings)
        units = {"pair": None, "chosen token": CHOSEN_TEXT if result.prompt_loss else "chosen_supervised"}
        return replace(result, units=units, every_token=result.prompt_loss)

    def derived(self, rows: Any) -> "dict[str, np.ndarray]":
        """Return the tokens of a pair's chosen text that are predicted: all but the first."""
        return {CHOSEN_TEXT: token_counts(rows, "input_ids") - 1} if self.prompt_loss else {}

    def sequences(self, row: Sequence) -> list[Sequence]:
        """Return the chosen and the rejected sequence."""
        import numpy as np

        sequences = super().sequences(row)
        if self.prompt_loss:
            for each in sequences:
                each[MARK] = np.asarray(each["labels"]) >= 0
            sequences[0]["labels"] = row["input_ids"]
        return sequences

    def of_answers(self, batch: Mapping[str, Any]) -> "torch.Tensor":
        """Return which supervised tokens are an answer's."""
        mark: torch.Tensor = batch[MARK] if self.prompt_loss else super().of_answers(batch)
        return mark

    def preference(self, chosen: Side, rejected: Side) -> "torch.Tensor":
        """Return the loss of each pair."""
        from torch.nn.functional import logsigmoid

        return -self.beta * logsigmoid(_log_odds(chosen.mean_change) - _log_odds(rejected.mean_change))

    def reward(self, answers: Side) -> "torch.Tensor":
        """Return beta times the mean log-probability of a token."""
        return self.beta * answers.mean_change


def _log_odds(log_probability: "torch.Tensor") -> "torch.Tensor":
    """Return log(p / (1 - p)) for log(p)."""
    import torch

    x = log_probability.clamp(max=-torch.finfo(log_probability.dtype).tiny)  # a probability of 1 has infinite odds
    return x - (-torch.expm1(x)).log()


OBJECTIVE = OddsRatio(name="orpo", order=50, metrics=of_pairs(WITHOUT), learning_rate=5e-5, costly=("prompt_loss",))
