"""Reads rows of a prepared split as numpy arrays, which are views of the memory-mapped file.

`datasets` decodes each token to a Python integer, which takes 16 times as long, and with the values of a teacher 600
times (benchmarks/train/feeding.py).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class RowColumns:
    """The columns of a split, by row."""

    def __init__(self, rows: Any) -> None:
        """rows: a `datasets.Dataset` in its stored order."""
        self._rows = rows
        self._lists: dict[str, _Lists] = {}
        self._numbers: dict[str, np.ndarray] = {}

    def rows(self, numbers: Sequence[int], names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield rows with some of their columns: lists as read-only arrays, numbers as Python's."""
        columns = [self._of(name, numbers) for name in names]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))

    def _of(self, name: str, numbers: Sequence[int]) -> Sequence[Any]:
        import pyarrow

        if name not in self._lists and name not in self._numbers:
            column = self._rows.data.column(name)
            if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
                self._lists[name] = _Lists(column)
            else:
                self._numbers[name] = column.to_numpy()
        if name in self._numbers:
            values: list[Any] = self._numbers[name][numbers].tolist()
            return values
        return [self._lists[name][number] for number in numbers]


class _Lists:
    """A column of lists of numbers, in one or more parts."""

    def __init__(self, column: Any) -> None:
        self._parts = [(part.offsets.to_numpy(), part.values.to_numpy()) for part in column.chunks]
        self._starts = np.cumsum([0, *(len(part) for part in column.chunks)])

    def __getitem__(self, number: int) -> np.ndarray:
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        offsets, values = self._parts[part]
        at = number - self._starts[part]
        result: np.ndarray = values[offsets[at] : offsets[at + 1]]
        return result


@functools.lru_cache(maxsize=4)
def columns_of(rows: Any) -> RowColumns:
    """Return the columns of a split, which are found once for all its rows."""
    return RowColumns(rows)
