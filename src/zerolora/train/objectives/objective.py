"""The interface of an objective: its columns, its loss in units of a global batch, its memory and passes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from zerolora.config.objective_sections import WithReference
from zerolora.types import RowKind

if TYPE_CHECKING:
    import numpy as np
    import torch

    from zerolora.config.schema import TrainSection
    from zerolora.model.fused_kernels import Part
    from zerolora.train.head_loss import HeadLoss

Sequence = dict[str, Any]
"""One text for the model: input_ids, labels, source, and numbers, the same in all sequences of an objective."""
MARK = "mark"
"""Key of a sequence: a number for each token, in a batch `mark`, that of each supervised token."""
OF_TOKENS = "of_tokens"
"""Key of a sequence: by column, the values of its supervised tokens, k of each, in their order: [k x supervised
tokens]. In a batch those of all sequences, without padding."""


class Values(NamedTuple):
    """A term of the loss, or a metric, for each item of a micro-batch: a token, a row, a pair."""

    each: "torch.Tensor"
    """[items]"""
    source: "torch.Tensor"
    """The number of each item's data source: [items]."""


class AddedMemory(NamedTuple):
    """Bytes of one rank that an objective takes in addition to next-token loss."""

    activations: float = 0.0
    """From its loss in the forward pass to that loss's backward pass."""
    states: float = 0.0
    """On the device throughout training."""
    host: float = 0.0
    """On the host throughout training."""
    batch: float = 0.0
    """On the device throughout a micro-batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective(ABC):
    """An objective of `train.objective`. Each term and metric is a mean over the items of a unit in the global batch,
    so micro-batches, accumulation and ranks change nothing.

    The keys of its section in `train`, which has its name, are fields of its class.
    """

    name: str
    """The name in train.objective."""
    order: int
    """Position in tables."""
    units: Mapping[str, str | None]
    """For each unit, named in the singular, the column of prepared rows that counts it; None counts rows."""
    terms: Mapping[str, str]
    """The unit of each term of the loss, which is their sum. Shares of data sources are in the first one's."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """The unit of each further metric: columns of loss.csv and telemetry.csv."""
    before: Mapping[str, str] = field(default_factory=dict)
    """The unit of each mean that the loss needs; a forward pass over the global batch computes them before the step."""
    columns: tuple[str, ...] = ("input_ids", "labels")
    """Columns of tokens of a prepared row."""
    texts: tuple[str, ...] = ("input_ids",)
    """Those of `columns` with the tokens of its sequences, one each."""
    numbers: tuple[str, ...] = ()
    """Columns with a number that the loss needs: in a batch `numbers`, each [sequences], fp64."""
    of_tokens: tuple[str, ...] = ()
    """Columns with k values of each supervised token, one token's after another's (`OF_TOKENS`)."""
    before_columns: tuple[str, ...] = ()
    """Further columns that `sequences_before` needs."""
    other_row: str | None = None
    """A column with the number of another row, which `sequences_before` gets instead of the number."""
    best: str = "loss"
    """The figure that validation keeps the best of, also for early stopping: the loss, or a metric."""
    highest: bool = False
    """The best value is the highest."""
    rows: RowKind = "texts"
    """What a row holds."""
    reference: bool = False
    """The loss compares with the log-probabilities of a reference (stage `reference`), by default the model that
    training starts from."""
    taught: bool = False
    """The loss compares with the probabilities of a teacher (stage `teacher`)."""
    own_head_loss: bool = False
    """`head_loss` returns one, so that no fused kernel computes the losses of tokens."""
    by_token: bool = False
    """Every term is a sum over tokens, so that ranks can share rows (train.sequence_parallel)."""
    learning_rate: float = 2e-4
    """The default of train.learning_rate for LoRA; the method's `rate` multiplies it. 2e-4 as for models of 7 and 13
    billion parameters in QLoRA (arXiv 2305.14314, table 9)."""
    costly: tuple[str, ...] = ()
    """The keys of its section that memory or time depend on."""
    every_token: bool = False
    """Losses of tokens that prepared rows do not count as supervised are computed too."""

    def of(self, train: "TrainSection") -> "Objective":
        """Return the objective with the settings of its section."""
        section = getattr(train, self.name, None)
        return self if section is None else self.configured(dict(section))

    def configured(self, settings: Mapping[str, Any]) -> Self:
        """Return the objective with some settings; those that are left out stay. The stage `reference` has its own."""
        return replace(self, **{key: value for key, value in settings.items() if key not in WithReference.model_fields})

    def derived(self, rows: Any) -> "dict[str, np.ndarray]":
        """Return columns that follow from those of a prepared split, by name: each [rows]. Raises UserError if a split
        allows no such column."""
        return {}

    def sequences(self, row: Sequence) -> list[Sequence]:
        """Return the sequences of a prepared row, always the same number, packed side by side. In a batch, `sequence`
        is the number of a supervised token's sequence; those of a row are consecutive."""
        return [row]

    def sequences_before(self, row: Sequence) -> list[Sequence]:
        """Return the sequences of a prepared row in the pass that computes `before`."""
        return self.sequences(row)

    def head_loss(self, batch: Mapping[str, Any]) -> "HeadLoss | None":
        """Return what the head computes for each supervised token of a micro-batch from its logits, if that is not the
        cross-entropy."""
        return None

    @abstractmethod
    def values(self, losses: "torch.Tensor", batch: Mapping[str, Any], means: Mapping[str, float]) -> dict[str, Values]:
        """Return terms and metrics of a micro-batch, by name.

        losses: cross-entropy of each supervised token, [supervised tokens], fp32, with gradient; or the values of
        `head_loss`, [outputs, supervised tokens], of which the first have a gradient. batch: from train/feed.py,
        collate. means: those of `before`.
        """

    def values_before(self, losses: "torch.Tensor", batch: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """Return the items of the means `before`, by name: [items] of a micro-batch, without gradient."""
        return {}

    def remark(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning about the metrics of the first step, which are those of the model before training."""
        return None

    def memory(self, supervised: int, trained: int) -> AddedMemory:
        """Return the memory for the supervised tokens of a micro-batch and the trained parameters."""
        return AddedMemory()

    def kernels(self, parts: "tuple[Part, ...]") -> "tuple[Part, ...]":
        """Return the parts of a model that liger-kernel computes under this objective, of those that it could."""
        return tuple(part for part in parts if part != "loss" or not self.own_head_loss)

    def chunk_memory(self, tokens: float, vocabulary: int, width: int) -> float:
        """Return the bytes that `head_loss` takes beyond those of cross-entropy for the logits of a chunk, [tokens,
        vocabulary], with weights of `width` bytes."""
        return 0.0

    def logit_bytes(self) -> float:
        """Return the bytes that `head_loss` moves for each logit beside those of cross-entropy, for the cost model."""
        return 0.0

    def row_bytes(self, supervised: int) -> int:
        """Return the bytes on disk of the columns `of_tokens` for the supervised tokens of all rows."""
        return 0

    @property
    def forwards_before(self) -> int:
        """The forward passes of a global batch before its step, for the cost model."""
        return 1 if self.before else 0

    @property
    def loss_unit(self) -> str:
        """The unit of the loss, as in "per supervised token"; empty if its terms have several."""
        names = {*self.terms.values()}
        return f"per {names.pop()}" if len(names) == 1 else ""

    @property
    def reads(self) -> set[str]:
        """All columns of prepared rows that it needs."""
        other = {self.other_row} if self.other_row else set[str]()
        columns = (*self.columns, *self.numbers, *self.of_tokens, *self.before_columns)
        return {*columns, *other, *filter(None, self.units.values())}


def token_counts(rows: Any, column: str) -> "np.ndarray":
    """Return the tokens of each row of a split in a column of tokens: [rows], int64."""
    import numpy as np
    import pyarrow.compute

    return np.asarray(pyarrow.compute.list_value_length(rows.data.column(column)), dtype=np.int64)


def by_sequence(values: "torch.Tensor", batch: Mapping[str, Any]) -> "torch.Tensor":
    """Sum values of supervised tokens over each sequence of a batch: [sequences], fp64."""
    values = values.double()
    return values.new_zeros(len(batch["sources"])).index_add(0, batch["sequence"], values)
