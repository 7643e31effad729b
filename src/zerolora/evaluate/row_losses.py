"""The losses of whole rows: the summed cross-entropy of the supervised tokens of each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from zerolora.data.prepared_rows import IGNORED
from zerolora.evaluate.generation import SharedPrefix, shared_prefix
from zerolora.model.rope import first_grown
from zerolora.model.spec import EVALUATION_TOKENS


def summed_losses(
    model: Any, rows: Any, known: Mapping[int, float] = MappingProxyType({})
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return the summed cross-entropy of each row's supervised tokens: [rows]; `known` are those of some, by number.

    The common prefix of the others, up to the first supervised token, is computed once.
    """
    lengths = [len(tokens) for tokens in rows["input_ids"]]
    order = sorted({*range(len(rows))} - known.keys(), key=lambda index: (lengths[index], index))
    # A row whose rotary factors change with its length is computed by itself, as they would follow the longest.
    short = first_grown(model, [lengths[index] for index in order])
    prefix = shared_prefix(model, [_before_supervised(rows[index]) for index in order[:short]])
    sums = np.zeros(len(rows))
    sums[[*known.keys()]] = [*known.values()]
    while order:
        # Rows of similar length, up to EVALUATION_TOKENS tokens with padding, but at least one row.
        longest, by_itself = lengths[order[-1]], len(order) > short
        together = 1 if by_itself else max(1, min(len(order), EVALUATION_TOKENS // longest))
        members, before = [order.pop() for _ in range(together)], SharedPrefix() if by_itself else prefix
        ids, labels, mask = torch.zeros(3, len(members), longest, dtype=torch.long)
        labels[:] = IGNORED
        for index, member in enumerate(members):
            row, length = rows[member], lengths[member]
            ids[index, :length] = torch.tensor(row["input_ids"])
            labels[index, :length] = torch.tensor(row["labels"])
            mask[index, :length] = 1
        # Logits start at the position before the first supervised token, so none are computed for prompts.
        kept = longest - 1 - int((labels[:, 1:] != IGNORED).any(0).float().argmax())
        with torch.no_grad():
            output = model(
                input_ids=ids[:, before.length :].to(model.device),
                attention_mask=mask.to(model.device),
                logits_to_keep=kept + 1,
                **before.inputs(model, len(members), longest),
            )
        targets = labels[:, -kept:].to(output.logits.device)
        logits = output.logits[:, -kept - 1 : -1]  # some classes make all
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        sums[members] = losses.view_as(targets).double().sum(1).tolist()
    return sums


def supervised_tokens(rows: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the number of each row's supervised tokens, without its first token, which is never predicted: [rows]."""
    return np.array([sum(label != IGNORED for label in labels[1:]) for labels in rows["labels"]], np.int64)


def _before_supervised(row: Mapping[str, Any]) -> list[int]:
    """Return a row's tokens before the first supervised one."""
    tokens: list[int] = row["input_ids"]
    first = next((at for at in range(1, len(tokens)) if row["labels"][at] != IGNORED), len(tokens))
    return tokens[:first]


def loss(model: Any, rows: Any, known: Mapping[int, float] = MappingProxyType({})) -> float:
    """Return the mean cross-entropy per supervised token of the rows; `known` are the sums of some rows, by number."""
    return float(summed_losses(model, rows, known).sum() / supervised_tokens(rows).sum())
