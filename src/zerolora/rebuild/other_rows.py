"""The first row in which two files of rows, or two prepared splits, differ."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolora.errors import UserError

MISSING = object()


def first_other_row(one: Path, other: Path, *, table: bool) -> int | None:
    """Return the number, from 1, of the first row in which two files differ; None if none does, or they cannot be read
    as rows. `table`: they are prepared splits, whatever their names."""
    read = _table if table else _rows
    try:
        pairs = itertools.zip_longest(read(one), read(other), fillvalue=MISSING)
        return next((number for number, (first, second) in enumerate(pairs, 1) if first != second), None)
    except (UserError, OSError, ValueError):
        return None


def _table(path: Path) -> Iterator[Any]:
    import pyarrow

    for batch in pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))):
        yield from batch.to_pylist()


def _rows(path: Path) -> Iterator[Any]:
    from zerolora.data.readers import chunks

    for chunk in chunks(path):
        for _, row in chunk.records():
            yield row
