"""KTO (arXiv 2402.01306): answers that are each desirable or not, against how far the model has moved as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolora.train.objectives.mismatched import mismatched, partners
from zerolora.train.objectives.objective import AddedMemory, Objective, Sequence, Values, by_sequence

if TYPE_CHECKING:
    import numpy as np
    import torch

PARTNER, UNDESIRABLE, LONGEST = "partner", "undesirable", "longest"
"""Derived columns: the row whose answer a mismatched sequence has, 1 for an undesirable answer, the tokens of the
split's longest row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KahnemanTversky(Objective):
    """A value of each answer, relative to the mean change of mismatched sequences in the global batch."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def derived(self, rows: Any) -> "dict[str, np.ndarray]":
        """Return the derived columns."""
        import numpy as np

        columns = rows.with_format("numpy")
        length = np.asarray(columns["length"][:])
        return {
            PARTNER: partners(np.asarray(columns["prompt_hash"][:])),
            UNDESIRABLE: 1 - np.asarray(columns["desirable"][:]),
            LONGEST: np.full(len(rows), length.max(initial=0)),
        }

    def sequences(self, row: Sequence) -> list[Sequence]:
        """Return the row's own sequence."""
        return [{name: row[name] for name in (*self.columns, "source", "desirable", "reference")}]

    def sequences_before(self, row: Sequence) -> list[Sequence]:
        """Return the mismatched sequence, with its own reference."""
        tokens = mismatched(row, row[PARTNER], row[LONGEST])
        return [self.sequences(row)[0] | tokens | {"reference": row["reference_mismatched"]}]

    def values_before(self, losses: "torch.Tensor", batch: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Return the change of the log-probability of each mismatched answer."""
        return {"kl": -by_sequence(losses, batch) - batch["numbers"]["reference"]}

    def values(self, losses: "torch.Tensor", batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        """Return loss and metrics of each answer; rewards of those that are desirable, or not."""
        numbers, sources = batch["numbers"], batch["sources"]
        change, desirable = -by_sequence(losses, batch) - numbers["reference"], numbers["desirable"] == 1
        kl = max(0.0, means["kl"])
        sign = 2.0 * desirable - 1
        weight = self.desirable_weight * desirable + self.undesirable_weight * ~desirable
        loss = weight * (1 - (sign * self.beta * (change - kl)).sigmoid())
        reward = self.beta * change.detach()
        return {
            "loss": Values(loss, sources),
            # Multiplied, since to select would make the host wait for a GPU.
            "desirable_reward": Values(reward * desirable, sources),
            "undesirable_reward": Values(reward * ~desirable, sources),
            "kl": Values(reward.new_full(reward.shape, kl), sources),
        }

    def memory(self, supervised: int, trained: int) -> AddedMemory:
        """Return the bytes of the tokens' gradients in fp64 and fp32 (benchmarks/memory/trace.py)."""
        return AddedMemory(activations=14 * supervised)


OBJECTIVE = KahnemanTversky(
    name="kto",
    order=60,
    rows="labelled",
    reference=True,
    units={"answer": None, "desirable answer": "desirable", "undesirable answer": UNDESIRABLE},
    terms={"loss": "answer"},
    metrics={"desirable_reward": "desirable answer", "undesirable_reward": "undesirable answer", "kl": "answer"},
    before={"kl": "answer"},
    numbers=("desirable", "reference", "reference_mismatched"),
    before_columns=("prompt", LONGEST),
    other_row=PARTNER,
    learning_rate=5e-6,
)
