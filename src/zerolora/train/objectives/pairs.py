"""What objectives of pairs share: two sequences of a row, the SFT term, and metrics of both answers."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from zerolora.train.objectives.objective import AddedMemory, Objective, Sequence, Values, by_sequence
from zerolora.types import RowKind

if TYPE_CHECKING:
    import torch

REFERENCES = ("reference_chosen", "reference_rejected")
"""Columns with the log-probabilities of both answers under the reference."""
WITH_REFERENCE = ("reward_accuracy", "reward_margin", "chosen_change", "rejected_change")
TERMS = {"preference": "pair", "sft": "chosen token"}
WITHOUT = ("reward_accuracy", "reward_margin", "chosen_log_probability", "rejected_log_probability")


class Side(NamedTuple):
    """The answers of one side, chosen or rejected, of the pairs of a batch. All [pairs], fp64."""

    log_probability: "torch.Tensor"
    """Summed over the answer's tokens."""
    change: "torch.Tensor"
    """Of the log-probability since the start of training; without a reference the log-probability itself."""
    tokens: "torch.Tensor"

    @property
    def mean_change(self) -> "torch.Tensor":
        """The change of a token."""
        return self.change / self.tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs(Objective):
    """A loss of pairs plus `sft_weight` times the cross-entropy of the chosen answers' tokens.

    Metrics are means over pairs: the share whose chosen answer has the higher reward, the difference of the rewards,
    and the log-probabilities of both answers, or their changes.
    """

    rows: RowKind = "pairs"
    units: Mapping[str, str | None] = field(default_factory=lambda: {"pair": None, "chosen token": "chosen_supervised"})
    terms: Mapping[str, str] = field(default_factory=lambda: TERMS)
    columns: tuple[str, ...] = ("input_ids", "labels", "rejected_input_ids", "rejected_labels")
    texts: tuple[str, ...] = ("input_ids", "rejected_input_ids")
    sft_weight: float = 1.0

    def configured(self, settings: Mapping[str, Any]) -> Self:
        """Return the objective with some settings; without an SFT term if its weight is 0."""
        result = super().configured(settings)
        return replace(result, terms={name: unit for name, unit in TERMS.items() if name != "sft" or result.sft_weight})

    def sequences(self, row: Sequence) -> list[Sequence]:
        """Return the chosen and the rejected sequence."""
        shared = {"source": row["source"]}
        chosen, rejected = ({"reference": row[name]} if self.reference else {} for name in REFERENCES)
        return [
            {"input_ids": row["input_ids"], "labels": row["labels"], **shared, **chosen},
            {"input_ids": row["rejected_input_ids"], "labels": row["rejected_labels"], **shared, **rejected},
        ]

    def values(self, losses: "torch.Tensor", batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        """Return terms and metrics of a micro-batch."""
        import torch

        answer, of_chosen = self.of_answers(batch), batch["sequence"] % 2 == 0
        summed = -by_sequence(losses * answer, batch)
        change = summed - batch["numbers"]["reference"] if self.reference else summed
        tokens = by_sequence(answer.expand_as(losses), batch)
        chosen, rejected = (Side(*(each.view(-1, 2)[:, side] for each in (summed, change, tokens))) for side in (0, 1))
        sources = batch["sources"][::2]
        values = {"preference": Values(self.preference(chosen, rejected), sources)}
        if "sft" in self.terms:
            # Multiplied, since to select would make the host wait for a GPU.
            values["sft"] = Values(self.sft_weight * losses * of_chosen, batch["source"])
        with torch.no_grad():
            rewards = self.reward(chosen), self.reward(rejected)
            figures = (
                (rewards[0] > rewards[1]).double(),
                rewards[0] - rewards[1],
                chosen.change,
                rejected.change,
            )
        return values | {name: Values(each.detach(), sources) for name, each in zip(self.metrics, figures, strict=True)}

    def of_answers(self, batch: Mapping[str, Any]) -> "torch.Tensor":
        """Return 1 for each supervised token of an answer and 0 for each other, [supervised tokens]; or 1 for all."""
        ones: torch.Tensor = batch["sources"].new_ones(1)
        return ones

    @abstractmethod
    def preference(self, chosen: Side, rejected: Side) -> "torch.Tensor":
        """Return the loss of each pair: [pairs]."""

    @abstractmethod
    def reward(self, answers: Side) -> "torch.Tensor":
        """Return the reward of each answer that the loss compares: [pairs]."""

    def memory(self, supervised: int, trained: int) -> AddedMemory:
        """Return the bytes of the tokens' gradients in fp64 and fp32, and of masks; the SFT term has gradients of its
        own (benchmarks/memory/trace.py)."""
        return AddedMemory(activations=(24 if "sft" in self.terms else 18) * supervised)


def of_pairs(names: tuple[str, ...]) -> dict[str, str]:
    """Return metrics whose unit are pairs."""
    return dict.fromkeys(names, "pair")
