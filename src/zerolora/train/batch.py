"""Which rows a rank sees when, and the loss of a batch of them."""

from collections.abc import Iterator
from typing import Any

import torch

from zerolora.data.rows import IGNORED
from zerolora.errors import UserError


class Batches:
    """The rows of every optimizer step, in an order that depends on seed and global batch only.

    Epoch after epoch is one shuffled row of rows, cut into global batches; a rank takes its micro-batches
    out of each. Rows left over after the last whole global batch are not seen.
    """

    def __init__(self, rows: Any, settings: dict[str, Any], rank: int, world: int) -> None:
        self.rows, self.rank, self.world = rows, rank, world
        self.micro_batch, self.global_batch = settings["micro_batch"], settings["global_batch"]
        order = [
            torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings["seed"] + epoch))
            for epoch in range(settings["epochs"])
        ]
        self.order = torch.cat(order).tolist()
        whole = len(self.order) // self.global_batch
        if whole == 0:
            raise UserError(
                f"train.global_batch is {self.global_batch}, but {settings['epochs']} epochs have only "
                f"{len(self.order)} rows; lower it"
            )
        self.steps = min(whole, settings["max_steps"] or whole)
        seen = self.order[: self.steps * self.global_batch]
        lengths, supervised = _counts(rows)
        self._tokens = torch.tensor([lengths[row] for row in seen]).view(self.steps, -1).sum(1).cumsum(0).tolist()
        self._supervised = torch.tensor([supervised[row] for row in seen]).view(self.steps, -1).sum(1).tolist()
        self.supervised_tokens = sum(self._supervised)

    def at(self, step: int) -> tuple[list[dict[str, list[list[int]]]], int]:
        """Return this rank's micro-batches of a step, and the supervised tokens of the whole global batch."""
        first = step * self.global_batch
        batch = self.order[first : first + self.global_batch]
        share = self.micro_batch * self.world
        micro_batches = [
            self.rows[batch[start + self.rank * self.micro_batch :][: self.micro_batch]]
            for start in range(0, self.global_batch, share)
        ]
        return micro_batches, self._supervised[step]

    def tokens_until(self, steps: int) -> int:
        """Return the tokens of the first `steps` steps over all ranks, padding not counted."""
        return self._tokens[steps - 1]


def _counts(rows: Any) -> tuple[list[int], list[int]]:
    lengths, supervised = [], []
    for labels in _column(rows, "labels"):
        lengths.append(len(labels))
        supervised.append(sum(label != IGNORED for label in labels))
    return lengths, supervised


def _column(rows: Any, name: str) -> Iterator[list[int]]:
    for start in range(0, len(rows), 1000):
        yield from rows[start : start + 1000][name]


def collate(rows: dict[str, list[list[int]]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return input_ids, attention_mask and labels [rows, longest] of rows, padded on the right."""
    longest = max(len(row) for row in rows["input_ids"])
    shape = (len(rows["input_ids"]), longest)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED),
    }
    for index, (tokens, labels) in enumerate(zip(rows["input_ids"], rows["labels"], strict=True)):
        batch["input_ids"][index, : len(tokens)] = torch.tensor(tokens)
        batch["attention_mask"][index, : len(tokens)] = 1
        batch["labels"][index, : len(labels)] = torch.tensor(labels)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def loss_sum(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the summed cross-entropy of the batch's supervised tokens, fp32.

    Logits are made only from the position before the first supervised token on: prompts cost none.
    """
    targets = batch["labels"][:, 1:]
    kept = targets.shape[1] - int((targets != IGNORED).any(0).float().argmax())
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
        logits_to_keep=kept + 1,
    )
    logits = output.logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets[:, -kept:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
