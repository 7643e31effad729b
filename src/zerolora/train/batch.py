"""Which packed rows a rank sees when, and the loss of a micro-batch of them."""

from typing import Any

import numpy as np
import torch

from zerolora.data.plan import PackingPlan
from zerolora.data.rows import IGNORED
from zerolora.errors import UserError
from zerolora.train.attention import lengths
from zerolora.train.order import deal, global_batches, spread

PackedRow = list[dict[str, Any]]  # the rows that share it: input_ids, labels, source


class Batches:
    """The packed rows of every optimizer step, in an order that depends on seed and global batch only (order.py)."""

    def __init__(self, rows: Any, plan: PackingPlan, settings: dict[str, Any], rank: int, world: int) -> None:
        self.rows, self.plan, self.rank, self.world = rows, plan, rank, world
        self.micro_batch = settings["micro_batch"]
        if len(plan.members) != len(rows):
            raise UserError(
                f"the packing plan is of {len(plan.members)} rows, but the data has {len(rows)}; "
                "run `zerolora pack` again"
            )
        length, supervised, source = (_column(rows, name) for name in ("length", "supervised", "source"))
        self.tokens, self.work = _sums(length, plan), _sums(length**2, plan)
        # A row's first token is nobody's target, so prepare has not counted it either.
        self._supervised = _sums(supervised, plan)
        # Memory goes by the tokens of a packed row, whatever they attend to.
        largest = int(np.lexsort((self.work, self.tokens))[-1])
        self.order = global_batches(self.work, settings["seed"], settings["global_batch"], settings["epochs"], largest)
        if len(self.order) == 0:
            raise UserError(
                f"train.global_batch is {settings['global_batch']}, but {settings['epochs']} epochs have only "
                f"{len(self.work) * settings['epochs']} rows; lower it"
            )
        self.order = self.order[: settings["max_steps"]]
        self.steps = len(self.order)
        self._tokens_until = self.tokens[self.order].sum(1).cumsum()
        self._length, self._supervised_of_row, self._source = length, supervised, source

    def at(self, step: int) -> tuple[list[list[PackedRow]], int]:
        """Return this rank's micro-batches of a step, and the supervised tokens of the whole global batch."""
        batch = self.order[step]
        micro_batches = [
            [packed_row(self.rows, self.plan, number) for number in batch[places[self.rank]].tolist()]
            for places in deal(self.work[batch], self.world, self.micro_batch)
        ]
        return micro_batches, int(self._supervised[batch].sum())

    def sizes_at(self, step: int) -> tuple[int, int, int]:
        """Return the tokens of a step's global batch, the squared lengths of its rows together, and its supervised
        tokens; padding not counted."""
        batch = self.order[step]
        return int(self.tokens[batch].sum()), int(self.work[batch].sum()), int(self._supervised[batch].sum())

    def end_after(self, steps: int) -> None:
        """Forget the steps that were not made."""
        self.order, self.steps = self.order[:steps], steps

    def tokens_until(self, steps: int) -> int:
        """Return the tokens of the first `steps` steps over all ranks, padding not counted."""
        return int(self._tokens_until[steps - 1]) if steps else 0

    @property
    def supervised_tokens(self) -> int:
        """Return the supervised tokens of all steps over all ranks."""
        return int(self._supervised[self.order].sum())

    def balance(self) -> dict[str, float]:
        """Return how much ranks differ in tokens and in attention work, in the mean and in the worst global batch, and
        the share of padding among all positions that they compute."""
        found: dict[str, list[float]] = {"tokens": [], "attention": []}
        positions = 0.0
        for batch in self.order:
            dealt = deal(self.work[batch], self.world, self.micro_batch)
            found["tokens"].append(spread(self.tokens[batch], dealt))
            found["attention"].append(spread(self.work[batch], dealt))
            positions += self.tokens[batch][dealt].max(2).sum() * self.micro_batch
        result = {"padding_share": 1 - self.tokens_until(self.steps) / positions}
        for name, values in found.items():
            result[f"rank_{name}_spread_mean"] = sum(values) / len(values)
            result[f"rank_{name}_spread_worst"] = max(values)
        return {name: round(float(value), 6) for name, value in result.items()}

    def tokens_by_source(self, sources: int) -> list[int]:
        """Return the tokens of all steps over all ranks, by source."""
        return self._by_source(self._length, sources)

    def supervised_by_source(self, sources: int) -> list[int]:
        """Return the supervised tokens of all steps over all ranks, by source."""
        return self._by_source(self._supervised_of_row, sources)

    def _by_source(self, counts: np.ndarray, sources: int) -> list[int]:
        times = np.bincount(self.order.ravel(), minlength=len(self.work))
        members = self.plan.members
        seen = np.repeat(times, np.diff(self.plan.starts)) * counts[members]
        return np.bincount(self._source[members], seen, sources).astype(int).tolist()


def packed_row(rows: Any, plan: PackingPlan, number: int) -> PackedRow:
    """Return the rows of packed row `number`."""
    columns = rows[plan.members[plan.starts[number] : plan.starts[number + 1]].tolist()]
    names = ("input_ids", "labels", "source")
    return [dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)]


def collate(packed_rows: list[PackedRow], packing: bool, device: torch.device) -> dict[str, Any]:
    """Return a batch of packed rows, padded on the right to the longest: input_ids, [packed rows, longest]; the places
    in the flattened batch from which supervised tokens are predicted, these tokens as `targets`, and the `source` of
    each, [supervised tokens]; and what keeps rows apart.

    Without packing attention_mask marks the padding. With packing there is none, as models take one for the whole of
    what a token may see; position_ids that begin anew at every row, and at the padding, keep rows apart, and no row's
    first token is a target. `lengths` are for attention that takes a row at a time.
    """
    longest = max(sum(len(row["input_ids"]) for row in packed) for packed in packed_rows)
    shape = (len(packed_rows), longest)
    names = ("input_ids", "labels", "source", "position_ids" if packing else "attention_mask")
    batch: dict[str, Any] = {name: np.zeros(shape, dtype=np.int64) for name in names}
    batch["labels"].fill(IGNORED)
    of_rows = []
    for index, packed in enumerate(packed_rows):
        start = 0
        for row in packed:
            end = start + len(row["input_ids"])
            batch["input_ids"][index, start:end] = row["input_ids"]
            batch["labels"][index, start + 1 : end] = row["labels"][1:]
            batch["source"][index, start:end] = row["source"]
            if packing:
                batch["position_ids"][index, start:end] = np.arange(end - start)
            else:
                batch["attention_mask"][index, start:end] = 1
            start = end
        if packing:
            batch["position_ids"][index, start:] = np.arange(longest - start)
        of_rows.append([len(row["input_ids"]) for row in packed] + [longest - start] * (start < longest))
    labels, source = batch.pop("labels").ravel(), batch.pop("source").ravel()
    targets = np.flatnonzero(labels != IGNORED)
    batch |= {"supervised": targets - 1, "targets": labels[targets], "source": source[targets]}
    return {name: torch.from_numpy(values).to(device) for name, values in batch.items()} | {"lengths": of_rows}


def loss_sum(model: Any, batch: dict[str, Any], sources: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of the batch's supervised tokens, fp32, and its parts by source, detached."""
    found = losses(model, batch)
    parts = torch.zeros(sources, dtype=torch.float32, device=found.device)
    parts.index_add_(0, batch["source"], found.detach())
    return found.sum(), parts


def losses(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the cross-entropy of each supervised token, fp32: [supervised tokens]."""
    found = model(**_inputs(batch), use_cache=False, supervised=batch["supervised"], targets=batch["targets"])
    assert isinstance(found, torch.Tensor)
    return found


def logits_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the logits of a batch, [packed rows, longest, vocabulary]."""
    logits = model(**_inputs(batch), use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def _inputs(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a model is called with; never with a cache, with which models take no notice that positions begin
    anew, and packed rows see each other."""
    lengths.set(batch["lengths"])
    return {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}


def _column(rows: Any, name: str) -> np.ndarray:
    return np.asarray(rows.with_format("numpy")[name][:], dtype=np.int64)


def _sums(values: np.ndarray, plan: PackingPlan) -> np.ndarray:
    """Return the sum of `values` [rows] over each packed row."""
    return np.add.reduceat(values[plan.members], plan.starts[:-1])
