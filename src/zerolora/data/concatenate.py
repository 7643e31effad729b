"""Joins the training rows of each source end to end, and cuts them into rows of one length."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from zerolora.data.prepared_rows import IGNORED, schema

WRITTEN = 1024  # rows of one batch


def concatenated(rows: Any, length: int, seed: int | None) -> Iterator[Any]:
    """Yield record batches of rows of `length` tokens from a pyarrow.Table of texts; the last one of a source may be
    shorter.

    Rows are joined in the order of the table, or with a seed in a random one. The first token of a row is predicted by
    none, so it is not supervised; rows without any supervised token, which teach nothing, are left out.
    """
    source = rows["source"].to_numpy()
    order = np.arange(len(rows)) if seed is None else np.random.default_rng(seed).permutation(len(rows))
    texts = _Texts(rows)
    for number in np.unique(source):
        made: list[tuple[np.ndarray, np.ndarray]] = []
        for tokens, labels in _cut(texts, order[source[order] == number], length):
            labels[0] = IGNORED
            if (labels != IGNORED).any():
                made.append((tokens, labels))
            if len(made) == WRITTEN:
                yield _batch(made, number)
                made = []
        if made:
            yield _batch(made, number)


class _Texts:
    """The tokens and labels of each row of a table, as views of its memory."""

    def __init__(self, rows: Any) -> None:
        self.parts = []
        for batch in rows.select(["input_ids", "labels"]).to_batches():
            ids, labels = batch["input_ids"], batch["labels"]
            self.parts.append((ids.offsets.to_numpy(), ids.values.to_numpy(), labels.values.to_numpy()))
        self.starts = np.cumsum([0, *(len(offsets) - 1 for offsets, _, _ in self.parts)])

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        part = int(np.searchsorted(self.starts, row, "right")) - 1
        offsets, ids, labels = self.parts[part]
        start, end = offsets[row - self.starts[part]], offsets[row - self.starts[part] + 1]
        return ids[start:end], labels[start:end]


def _cut(texts: _Texts, order: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens and labels of rows that are joined in an order, `length` at a time."""
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for row in order.tolist():
        waiting.append(texts[row])
        count += len(waiting[-1][0])
        if count >= length:
            ids, labels = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
            whole = count - count % length
            for start in range(0, whole, length):
                yield ids[start : start + length], labels[start : start + length]
            waiting, count = [(ids[whole:], labels[whole:])], count - whole
    if count:
        ids, labels = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        yield ids, labels


def _batch(made: list[tuple[np.ndarray, np.ndarray]], source: int) -> Any:
    import pyarrow

    ids, labels = zip(*made, strict=True)
    columns = [
        pyarrow.array(ids, pyarrow.list_(pyarrow.int32())),
        pyarrow.array(labels, pyarrow.list_(pyarrow.int32())),
        np.array([len(each) for each in ids], np.int32),
        np.array([(each != IGNORED).sum() for each in labels], np.int32),
        np.full(len(made), source, np.int16),
    ]
    return pyarrow.record_batch(columns, schema=schema(held_out=False))
