"""Which packed rows a rank sees when, and the loss of a micro-batch of them."""

from typing import Any

import numpy as np
import torch

from zerolora.data.plan import Plan
from zerolora.data.rows import IGNORED
from zerolora.errors import UserError
from zerolora.train.order import deal, global_batches, spread

PackedRow = list[dict[str, Any]]  # the rows that share it: input_ids, labels, source


class Batches:
    """The packed rows of every optimizer step, in an order that depends on seed and global batch only (order.py)."""

    def __init__(self, rows: Any, plan: Plan, settings: dict[str, Any], rank: int, world: int) -> None:
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

    def tokens_until(self, steps: int) -> int:
        """Return the tokens of the first `steps` steps over all ranks, padding not counted."""
        return int(self._tokens_until[steps - 1])

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


def packed_row(rows: Any, plan: Plan, number: int) -> PackedRow:
    """Return the rows of packed row `number`."""
    columns = rows[plan.members[plan.starts[number] : plan.starts[number + 1]].tolist()]
    names = ("input_ids", "labels", "source")
    return [dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)]


def collate(packed_rows: list[PackedRow], packing: bool, device: torch.device) -> dict[str, torch.Tensor]:
    """Return input_ids, labels and source of packed rows, [packed rows, longest], padded on the right.

    Without packing attention_mask marks the padding. With packing there is none, as models take one for the whole of
    what a token may see; position_ids that begin anew at every row, and at the padding, keep rows apart, and no row's
    first token is a target.
    """
    longest = max(sum(len(row["input_ids"]) for row in packed) for packed in packed_rows)
    shape = (len(packed_rows), longest)
    names = ("input_ids", "labels", "source", "position_ids" if packing else "attention_mask")
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in names}
    batch["labels"].fill_(IGNORED)
    for index, packed in enumerate(packed_rows):
        start = 0
        for row in packed:
            end = start + len(row["input_ids"])
            batch["input_ids"][index, start:end] = torch.tensor(row["input_ids"])
            batch["labels"][index, start + 1 : end] = torch.tensor(row["labels"][1:])
            batch["source"][index, start:end] = row["source"]
            if packing:
                batch["position_ids"][index, start:end] = torch.arange(end - start)
            else:
                batch["attention_mask"][index, start:end] = 1
            start = end
        if packing:
            batch["position_ids"][index, start:] = torch.arange(longest - start)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def loss_sum(model: Any, batch: dict[str, torch.Tensor], sources: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy of the batch's supervised tokens, fp32, and its parts by source, detached.

    Logits are made only from the position before the first supervised token on: prompts cost none.
    """
    targets = batch["labels"][:, 1:]
    kept = targets.shape[1] - int((targets != IGNORED).any(0).float().argmax())
    logits = last_logits(model, batch, kept + 1)[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, -kept:].flatten(), ignore_index=IGNORED, reduction="none"
    )
    parts = torch.zeros(sources, dtype=torch.float32, device=losses.device)
    parts.index_add_(0, batch["source"][:, 1:][:, -kept:].flatten(), losses.detach())
    return losses.sum(), parts


def last_logits(model: Any, batch: dict[str, torch.Tensor], kept: int) -> torch.Tensor:
    """Return the logits of a batch's last `kept` positions, of all if 0: [packed rows, kept, vocabulary]."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    # With a cache, models take no notice that positions begin anew, and packed rows see each other.
    return model(**inputs, use_cache=False, logits_to_keep=kept).logits


def _column(rows: Any, name: str) -> np.ndarray:
    return np.asarray(rows.with_format("numpy")[name][:], dtype=np.int64)


def _sums(values: np.ndarray, plan: Plan) -> np.ndarray:
    """Return the sum of `values` [rows] over each packed row."""
    return np.add.reduceat(values[plan.members], plan.starts[:-1])
