"""The packing plan on disk: which prepared rows make up each packed row."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerolora.errors import UserError

CHUNK = 100_000  # packed rows written at once


class Plan(NamedTuple):
    """Packed row i is made of the prepared rows `members[starts[i] : starts[i + 1]]`, in that order.

    starts: int64 [packed rows + 1]; members: int32 [rows].
    """

    starts: np.ndarray
    members: np.ndarray


def write_plan(path: Path, packed: Iterable[list[int]]) -> None:
    """Write packed rows, each a list of row numbers, as an Arrow stream with one column, `rows`."""
    import pyarrow

    kind = pyarrow.list_(pyarrow.int32())
    schema = pyarrow.schema([("rows", kind)])
    waiting = iter(packed)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        while chunk := list(islice(waiting, CHUNK)):
            writer.write_batch(pyarrow.record_batch([pyarrow.array(chunk, kind)], schema=schema))


def open_plan(path: Path) -> Plan:
    """Return the plan in `path`. Raises UserError if it is not there or not whole."""
    import pyarrow

    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `zerolora pack` writes it")
    try:
        with pyarrow.memory_map(str(path)) as source:
            columns = [batch["rows"] for batch in pyarrow.ipc.open_stream(source)]
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: is not a whole Arrow file ({reason}); run `zerolora pack` again") from None
    lengths = [np.diff(column.offsets.to_numpy()) for column in columns]
    starts = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))]).astype(np.int64)
    members = [column.flatten().to_numpy() for column in columns]
    return Plan(starts, np.concatenate([np.zeros(0, np.int32), *members]))
