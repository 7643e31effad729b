"""Ragged arrays: lists of different lengths in two flat arrays, processed by a single numpy call."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """A ragged array. List `i` is values[offsets[i]:offsets[i + 1]]; values [elements], offsets [lists + 1]."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, lists: list[Any], kind: Any = np.int32) -> "Ragged":
        """Return a ragged array of lists of numbers."""
        return cls(np.fromiter(chain.from_iterable(lists), kind), bounds(map(len, lists)))

    def __len__(self) -> int:
        """Return the number of lists."""
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        """Return list `number`."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The length of each list [lists]."""
        return np.diff(self.offsets)

    @property
    def heads(self) -> np.ndarray:
        """The position in `values` of the first element of each non-empty list."""
        return self.offsets[:-1][self.lengths > 0]

    def take(self, which: np.ndarray) -> "Ragged":
        """Return the lists with these indices, in this order."""
        return self.slices(self.offsets[which], self.offsets[which + 1])

    def slices(self, starts: np.ndarray, ends: np.ndarray) -> "Ragged":
        """Return values[start:end] for each pair of start and end."""
        offsets = bounds(ends - starts)
        # 4-byte indices if possible, since memory traffic dominates.
        kind = np.int32 if max(offsets[-1], len(self.values)) < 2**31 else np.int64
        indices = np.repeat((starts - offsets[:-1]).astype(kind), ends - starts)
        indices += np.arange(offsets[-1], dtype=kind)
        return Ragged(self.values[indices], offsets)

    def joined(self, counts: Iterable[int]) -> "Ragged":
        """Join consecutive lists: `counts[i]` of them become list i."""
        return Ragged(self.values, self.offsets[bounds(counts)])

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Return the sum over each list of `values` [elements]."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
        difference: np.ndarray = sums[self.offsets[1:]] - sums[self.offsets[:-1]]
        return difference


def bounds(lengths: Iterable[int]) -> np.ndarray:
    """Return the offsets [lists + 1] of concatenated lists of these lengths."""
    ends = np.cumsum(lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, np.int64))
    return np.concatenate([np.zeros(1, np.int64), ends])
