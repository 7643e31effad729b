"""Lists of different lengths in two flat arrays, so that one call of numpy does for all of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ragged:
    """List `i` is values[offsets[i]:offsets[i + 1]]; there is one offset more than lists."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, lists: list[Any], kind: Any = np.int32) -> "Ragged":
        """Return lists of numbers."""
        return cls(np.fromiter(chain.from_iterable(lists), kind), bounds(map(len, lists)))

    def __len__(self) -> int:
        """Return how many lists there are."""
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        """Return one list."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Return how long each list is."""
        return np.diff(self.offsets)

    @property
    def heads(self) -> np.ndarray:
        """Return where the first of each list stands in `values`, without those that are empty."""
        return self.offsets[:-1][self.lengths > 0]

    def take(self, which: np.ndarray) -> "Ragged":
        """Return some lists, in this order."""
        return self.slices(self.offsets[which], self.offsets[which + 1])

    def slices(self, starts: np.ndarray, ends: np.ndarray) -> "Ragged":
        """Return values[start:end] for each start and end."""
        offsets = bounds(ends - starts)
        # Numbers of four bytes where they suffice, as reading and writing them is all that takes time here.
        kind = np.int32 if max(offsets[-1], len(self.values)) < 2**31 else np.int64
        places = np.repeat((starts - offsets[:-1]).astype(kind), ends - starts)
        places += np.arange(offsets[-1], dtype=kind)
        return Ragged(self.values[places], offsets)

    def joined(self, counts: Iterable[int]) -> "Ragged":
        """Return as one list each so many that follow each other."""
        return Ragged(self.values, self.offsets[bounds(counts)])

    def totals(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of `values`, which are as many as this has, over each list."""
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
        difference: np.ndarray = sums[self.offsets[1:]] - sums[self.offsets[:-1]]
        return difference


def bounds(lengths: Iterable[int]) -> np.ndarray:
    """Return where lists of these lengths begin that stand one behind the other, and where the last ends."""
    ends = np.cumsum(lengths if isinstance(lengths, np.ndarray) else np.fromiter(lengths, np.int64))
    return np.concatenate([np.zeros(1, np.int64), ends])
