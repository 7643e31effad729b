"""The packing plan on disk: the rows of each packed row."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolora.errors import UserError

CHUNK = 2**20  # packed rows written at a time
END = b"\xff\xff\xff\xff\0\0\0\0"  # the end mark of a complete Arrow stream


class PackingPlan(NamedTuple):
    """Packed row i consists of the prepared rows members[starts[i] : starts[i + 1]], in order.

    starts: int64 [packed rows + 1]; members: int32 [rows].
    """

    starts: np.ndarray
    members: np.ndarray


def write_plan(path: Path, packed: Iterable[list[int]] | PackingPlan) -> None:
    """Write packed rows, as lists of row indices or as a plan, to an Arrow stream with one column, `rows`."""
    import pyarrow

    schema = pyarrow.schema([("rows", pyarrow.list_(pyarrow.int32()))])
    chunks = _slices(packed) if isinstance(packed, PackingPlan) else _lists(packed)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for chunk in chunks:
            writer.write_batch(pyarrow.record_batch([chunk], schema=schema))


def open_plan(path: Path) -> PackingPlan:
    """Open a plan. `members` is a view of the memory-mapped file for up to CHUNK packed rows. Raises UserError if the
    file is missing or incomplete."""
    import pyarrow

    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `zerolora stage pack` writes it")
    try:
        source = pyarrow.memory_map(str(path))
        columns = [batch["rows"] for batch in pyarrow.ipc.open_stream(source)]
        # Arrow reads a file truncated between two batches like a complete one.
        if source.read_at(len(END), source.size() - len(END)) != END:
            raise pyarrow.ArrowInvalid("its end is missing")
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: is not a whole Arrow file ({reason}); run `zerolora stage pack` again") from None
    lengths = [np.diff(column.offsets.to_numpy()) for column in columns]
    members = [column.flatten().to_numpy() for column in columns]
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)
    return PackingPlan(starts, members[0] if len(members) == 1 else np.concatenate([np.zeros(0, np.int32), *members]))


def _lists(packed: Iterable[list[int]]) -> Iterator[Any]:
    import pyarrow

    waiting = iter(packed)
    while chunk := list(islice(waiting, CHUNK)):
        yield pyarrow.array(chunk, pyarrow.list_(pyarrow.int32()))


def _slices(plan: PackingPlan) -> Iterator[Any]:
    import pyarrow

    for start in range(0, len(plan.starts) - 1, CHUNK):
        starts = plan.starts[start : start + CHUNK + 1]
        members = plan.members[starts[0] : starts[-1]].astype(np.int32, copy=False)
        yield pyarrow.ListArray.from_arrays((starts - starts[0]).astype(np.int32), members)
