"""Next-token loss (supervised fine-tuning): the cross-entropy of every supervised token."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from zerolora.train.objectives.objective import Objective, Values, by_sequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class NextToken(Objective):
    """The mean cross-entropy of supervised tokens, or of rows, each the mean of its supervised tokens."""

    mean: str = "token"

    def configured(self, settings: Mapping[str, Any]) -> Self:
        """Return the objective with some settings."""
        result = super().configured(settings)
        if result.mean == "token":
            return result
        return replace(result, units={"row": None}, terms={"loss": "row"}, by_token=False)

    def values(self, losses: "torch.Tensor", batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        """Return the loss of each token, or of each row."""
        if self.mean == "token":
            return {"loss": Values(losses, batch["source"])}
        tokens = by_sequence(losses.new_ones(len(losses)), batch)
        return {"loss": Values(by_sequence(losses, batch) / tokens, batch["sources"])}


OBJECTIVE = NextToken(
    name="sft",
    order=10,
    units={"supervised token": "supervised"},
    terms={"loss": "supervised token"},
    by_token=True,
)
