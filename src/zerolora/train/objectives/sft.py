"""Next-token loss (supervised fine-tuning): the cross-entropy of every supervised token."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolora.train.objectives.objective import Objective, Values

if TYPE_CHECKING:
    import torch


class NextToken(Objective):
    """The mean cross-entropy of supervised tokens."""

    def values(self, losses: "torch.Tensor", batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        return {"loss": Values(losses, batch["source"])}


OBJECTIVE = NextToken(
    name="sft",
    order=10,
    units={"supervised token": "supervised"},
    terms={"loss": "supervised token"},
    by_token=True,
)
