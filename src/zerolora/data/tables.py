"""Splits Parquet and Arrow files into chunks of rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolora.data.records import Chunk
from zerolora.errors import UserError, shown
from zerolora.json_file import repeated

STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def tables(path: Path, kind: str, rows: int, size: int) -> Iterator[Chunk]:
    """Stream a Parquet or Arrow file as `readers.chunks` does."""
    import pyarrow

    first = 1
    batches = _parquet_batches(path, rows, size) if kind == "parquet" else _arrow_batches(path)
    try:
        for batch, taken in batches:
            count, names = batch.num_rows, batch.schema.names
            if len(set(names)) < len(names):
                raise UserError(f"{path}: two columns are called {shown(repeated(names))}; rename one")
            step = max(1, min(rows, size * count // max(1, batch.nbytes)))
            for start in range(0, count, step):
                part = batch.slice(start, step)
                end = start + part.num_rows
                progress = taken * end // count - taken * start // count
                yield Chunk(str(path), kind, first, _ipc(part), progress)
                first += part.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: is not a whole {kind.capitalize()} file ({reason}); fetch or write it again"
        ) from None


def _parquet_batches(path: Path, rows: int, size: int) -> Iterator[tuple[Any, int]]:
    """Yield record batches, each with its share of the file in bytes."""
    from pyarrow.parquet import ParquetFile

    # By default, all pages of a row group would be in memory at once, and Arrow's threads would have separate heaps and
    # compete with the workers for cores.
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        metadata = file.metadata
        total = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        step = max(1, min(rows, size * metadata.num_rows // max(1, total)))
        length, read = path.stat().st_size, 0
        for batch in file.iter_batches(step, use_threads=False):
            before, read = read, read + batch.num_rows
            yield batch, length * read // metadata.num_rows - length * before // metadata.num_rows


def _arrow_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield record batches of an IPC file or stream, each with its share of the file in bytes."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        length = source.size()
        if source.read_at(6, 0) == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            count = file.num_record_batches
            for number in range(count):
                share = length * (number + 1) // count - length * number // count
                yield _sound(file.get_batch(number)), share
            return
        before = 0
        for batch in pyarrow.ipc.open_stream(source):
            yield _sound(batch), source.tell() - before
            before = source.tell()
        # Arrow reads a stream truncated between two batches like a complete one.
        if source.read_at(len(STREAM_END), length - len(STREAM_END)) != STREAM_END:
            raise pyarrow.ArrowInvalid("its end mark is missing")


def _sound(batch: Any) -> Any:
    """Return the batch if its offsets are within its buffers, which Arrow itself does not check."""
    import pyarrow

    # Texts are checked as bytes: invalid UTF-8 makes one row bad, not the whole file.
    for column in batch.columns:
        column.validate()
        if pyarrow.types.is_dictionary(column.type):
            column.indices.validate(full=True)
            values = _as_binary(column.dictionary)
            checked = pyarrow.DictionaryArray.from_arrays(
                column.indices, values, ordered=column.type.ordered, safe=False
            )
        else:
            checked = _as_binary(column)
        checked.validate(full=True)
    return batch


def _as_binary(array: Any) -> Any:
    kind = _binary(array.type)
    return array if kind == array.type else array.view(kind)


def _binary(kind: Any) -> Any:
    """Return an Arrow type with strings and JSON replaced by binary, which has the same layout."""
    import pyarrow
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return _binary(kind.storage_type)
    texts = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    if types.is_struct(kind):
        kind = pyarrow.struct([field.with_type(_binary(field.type)) for field in kind])
    elif types.is_map(kind):
        kind = pyarrow.map_(_binary(kind.key_type), kind.item_field.with_type(_binary(kind.item_type)))
    elif types.is_fixed_size_list(kind):
        kind = pyarrow.list_(kind.value_field.with_type(_binary(kind.value_type)), kind.list_size)
    elif types.is_list(kind) or types.is_large_list(kind):
        make = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        kind = make(kind.value_field.with_type(_binary(kind.value_type)))
    return texts.get(kind, kind)


def _ipc(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())
