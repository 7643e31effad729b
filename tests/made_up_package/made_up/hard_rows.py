"""hard_rows: rows harder than the mean of their global batch count more; every row counts once, however long it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolora.train.objectives.objective import AddedMemory, Objective, Values, by_sequence

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class HardRows(Objective):
    """The mean over rows of softplus(sharpness (row's loss - mean row's loss))."""

    sharpness: float = 1.0

    def values(self, losses: "torch.Tensor", batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        """Return the term and the row's loss of each row."""
        from torch.nn.functional import softplus

        each = self.of_rows(losses, batch)
        values = {"loss": softplus(self.sharpness * (each - means["mean_row"])), "row_loss": each.detach()}
        return {name: Values(value, batch["sources"]) for name, value in values.items()}

    def values_before(self, losses: "torch.Tensor", batch: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Return the row's loss of each row."""
        return {"mean_row": self.of_rows(losses, batch)}

    def of_rows(self, losses: "torch.Tensor", batch: Mapping[str, Any]) -> "torch.Tensor":
        """Return the mean loss of each row's supervised tokens: [rows], fp64."""
        return by_sequence(losses, batch) / batch["numbers"]["supervised"]

    def memory(self, supervised: int, trained: int) -> AddedMemory:
        """Return the bytes of the losses in fp64."""
        return AddedMemory(activations=8.0 * supervised)


OBJECTIVE = HardRows(
    name="hard_rows",
    order=90,
    units={"row": None},
    terms={"loss": "row"},
    metrics={"row_loss": "row"},
    before={"mean_row": "row"},
    numbers=("supervised",),
    best="row_loss",
)
