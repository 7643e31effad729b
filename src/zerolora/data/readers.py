"""Data files, cut into chunks in one process and read in others.

The process that streams a file only finds where rows end; what costs (decoding JSON, Arrow to Python) is left to
`Chunk.records`, so that it can run elsewhere.
"""

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.data.example import BadRow
from zerolora.errors import UserError, shown
from zerolora.files import read_json

DELIMITERS = {"csv": ",", "tsv": "\t"}
TEXTS = ("json", "jsonl", "ndjson", "csv", "tsv", "txt")
TABLES = ("parquet", "arrow")
PACKED = ("gz", "bz2", "xz", "zst")
KINDS = f".{', .'.join(TEXTS)} (each also .{', .'.join(PACKED)}), .{', .'.join(TABLES)}"
# What lies beside data: hidden files, what `datasets` and this project note down, DVC's pointers, words.
NO_DATA = re.compile(r"[._].*|(manifest|dataset_infos?)\.json|(README|LICENSE).*|.*\.(md|dvc)", re.IGNORECASE)
SAVED_BY = "datasets.save_to_disk"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"

# A list that is not closed, or a quote, would otherwise take the rest of the file into memory before it is noticed.
LONGEST_ROW = 1 << 28
# More text may mend an error this close to the end of what was read (half a literal, an escape, a number); a message
# shows as much of it.
UNSURE = 32

WHITE = b" \t\r\n"
BLANK = re.compile(r"[ \t\r\n]*")
BETWEEN = re.compile(r"[ \t\r\n,]*")
OPENING = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*")
COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
EMPTY_LINES = re.compile(r"(?:\r?\n)*")
DECODE = json.JSONDecoder().raw_decode
MEND = "mend it, since what follows cannot be read without it"

# From (text, position, whether it is the first, whether the text is the whole rest of the file) to a record's begin
# and end; None if the text ends before the record does, or holds no more.
Find = Callable[[str, int, bool, bool], tuple[int, int] | None]


class Chunk(NamedTuple):
    """Some rows of a file, still encoded: `first` is the number of the first line (of tables: row), from 1.

    `progress` is the bytes of the file on disk that it took; over a file they sum to about the file's size. `columns`
    are those of CSV.
    """

    file: str
    kind: str
    first: int = 1
    data: bytes = b""
    progress: int = 0
    columns: tuple[str, ...] = ()

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield each row's place, for messages ("rows.jsonl:12"), and its value: a dict, or a BadRow."""
        return _RECORDS[self.kind](self)


def files_of(path: Path) -> list[Path]:
    """Return the data files of a source, in order: itself, or all below it; a saved data set's in its own order.

    Raises UserError if there are none, for a file of an unknown kind, and for a saved DatasetDict.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or directory; correct the path")
    files = list(_below(path)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: holds no data file; put one there ({KINDS})")
    for file in files:
        _kind(file)
    return files


def chunks(path: Path, rows: int = 1000, size: int = 1 << 20) -> Iterator[Chunk]:
    """Stream a file as chunks of at most `rows` rows and about `size` bytes, in order and in bounded memory.

    Where they are cut depends on the file's content alone. Raises UserError, naming the file, if it is truncated or
    corrupt, or if a row is broken so that the next cannot be found.
    """
    kind, packing = _kind(path)
    if kind in TABLES:
        yield from _tables(path, kind, rows, size)
    else:
        yield from _texts(path, kind, packing, rows, size)


def _below(directory: Path) -> Iterator[Path]:
    if (directory / "dataset_dict.json").is_file():
        splits = read_json(directory / "dataset_dict.json", SAVED_BY)["splits"]
        raise UserError(f"{directory}: holds the splits {', '.join(splits)}; write path: {directory / splits[0]}")
    if (directory / "state.json").is_file() and any(directory.glob("data-*.arrow")):
        for entry in read_json(directory / "state.json", SAVED_BY)["_data_files"]:
            if not (directory / entry["filename"]).is_file():
                raise UserError(f"{directory}: state.json names {entry['filename']}, which is not there; save it again")
            yield directory / entry["filename"]
        return
    for path in sorted(directory.iterdir()):
        if NO_DATA.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from _below(path)
        else:
            yield path


def _kind(path: Path) -> tuple[str, str]:
    """Return a file's kind and its compression ("" for none), from its name."""
    *_, outer, last = ["", "", *(suffix[1:].lower() for suffix in path.suffixes)]
    if last in PACKED and outer in TEXTS:
        return outer, last
    if last in TEXTS or last in TABLES:
        return last, ""
    raise UserError(f"{path}: is of no kind that can be read; those are {KINDS}")


def _texts(path: Path, kind: str, packing: str, rows: int, size: int) -> Iterator[Chunk]:
    cut = _CUTS[kind]
    try:
        if not path.stat().st_size:
            return
        with path.open("rb") as raw, _unpacked(raw, packing) as stream:
            before = 0
            for chunk in cut(Chunk(str(path), kind), _blocks(path, stream, size), rows, size):
                yield chunk._replace(progress=raw.tell() - before)
                before = raw.tell()
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read to its end ({error}); fetch or write it again") from None


def _unpacked(raw: Any, packing: str) -> Any:
    if packing == "zst":
        import pyarrow

        return pyarrow.input_stream(raw, compression="zstd")
    openers: dict[str, Callable[[Any], Any]] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    return openers[packing](raw) if packing else raw


def _blocks(path: Path, stream: Any, size: int) -> Iterator[bytes]:
    """Yield what the stream holds, without a byte order mark."""
    first = stream.read(max(size, 3))
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}: is UTF-16; save it as UTF-8")
    if first := first.removeprefix(b"\xef\xbb\xbf"):
        yield first
    yield from iter(lambda: stream.read(size), b"")


def _cut_lines(chunk: Chunk, blocks: Iterator[bytes], rows: int, size: int) -> Iterator[Chunk]:
    """Cut behind line breaks, which no JSON object on one line holds."""
    line, held = 1, [b""]
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            for data, count in _every(b"".join((*held, block[:end])), rows):
                yield chunk._replace(first=line, data=data)
                line += count
            held = []
        held.append(block[end:])
        _check_length(chunk.file, line, sum(map(len, held)))
    if any(held):
        yield chunk._replace(first=line, data=b"".join(held))


def _every(data: bytes, rows: int) -> Iterator[tuple[bytes, int]]:
    """Cut whole lines into parts of at most `rows`; yield each with its number of lines."""
    import numpy as np

    lines = data.count(b"\n")
    if lines <= rows:
        yield data, lines
        return
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    start = 0
    for first in range(0, lines, rows):
        last = min(first + rows, lines)
        yield data[start : ends[last - 1]], last - first
        start = ends[last - 1]


def _cut_json(chunk: Chunk, blocks: Iterator[bytes], rows: int, size: int) -> Iterator[Chunk]:
    """Cut a JSON list behind its elements; a file of objects behind lines or, where they span lines, behind objects."""
    head, wanted = b"", 1
    while not (start := head.lstrip(WHITE)) or (start.startswith(b"{") and b"\n" not in start):
        more = b"".join(itertools.islice(blocks, wanted))
        if not more:
            break
        head, wanted = head + more, wanted * 2
        _check_length(chunk.file, 1, len(head))
    if not start:
        return
    line = 1 + head[: -len(start)].count(b"\n")
    blocks = itertools.chain([head], blocks)
    if start.startswith(b"["):
        yield from _cut(chunk._replace(kind="values"), blocks, _find_element, rows, size)
    elif not start.startswith(b"{"):
        found = shown(start[:20].splitlines()[0].decode("utf-8", "replace"))
        raise UserError(f"{chunk.file}:{line}: begins with {found}; write a list of objects, or an object a line")
    elif _goes_on(start.split(b"\n", 1)[0].decode("latin-1")):
        yield from _cut(chunk._replace(kind="values"), blocks, _find_object, rows, size)
    else:
        yield from _cut_lines(chunk._replace(kind="jsonl"), blocks, rows, size)


def _goes_on(line: str) -> bool:
    """Tell whether a JSON object begins on this line and goes on behind it."""
    try:
        DECODE(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip()) and not error.msg.startswith("Unterminated")
    except (ValueError, RecursionError):
        return False
    return False


def _cut_csv(chunk: Chunk, blocks: Iterator[bytes], rows: int, size: int) -> Iterator[Chunk]:
    """Cut behind records, whose quoted cells may hold line breaks. The first is the header."""
    find = functools.partial(_find_record, DELIMITERS[chunk.kind])
    found = _cut(chunk, blocks, find, rows, size, header=True)
    for header in itertools.islice(found, 1):
        columns = _header(header)
        for part in found:
            yield part._replace(columns=columns)


def _header(chunk: Chunk) -> tuple[str, ...]:
    (_, cells), *_ = _csv_records(chunk)
    where = f"{chunk.file}:{chunk.first}"
    if isinstance(cells, BadRow):
        raise UserError(f"{where}: the header {cells}")
    for number, cell in enumerate(cells, 1):
        if not cell.strip():
            raise UserError(f"{where}: column {number} has no name; the first line must name every column")
        if cell in cells[: number - 1]:
            raise UserError(f"{where}: two columns are called {shown(cell)}; rename one")
    return tuple(cells)


def _cut(
    chunk: Chunk, blocks: Iterator[bytes], find: Find, rows: int, size: int, header: bool = False
) -> Iterator[Chunk]:
    """Cut behind records of any form; the first stands in a chunk of its own if it is a header.

    Bytes are looked at as Latin-1: what structures JSON and CSV is ASCII, and positions are those of bytes.
    """
    text, whole, wanted = "", False, 1
    line, counted = 1, 0  # the number of the line that text[counted] is on
    start = position = count = 0
    first = True
    while True:
        try:
            found = find(text, position, first, whole)
        except _BrokenError as error:
            if whole or error.position + UNSURE <= len(text):
                line += text.count("\n", counted, error.position)
                raise UserError(f"{chunk.file}:{line}: {error}") from None
            found = None
        if found:
            begin, position = found
            if not count:
                line += text.count("\n", counted, begin)
                start = counted = begin
            count += 1
        if count and (count == (1 if header else rows) or position - start >= size or (whole and not found)):
            yield chunk._replace(first=line, data=text[start:position].encode("latin-1"))
            count, header = 0, False
        if found:
            first, wanted = False, 1
            continue
        if whole:
            return
        if not count:
            line += text.count("\n", counted, position)
            start = counted = position
        begin = BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        _check_length(chunk.file, line + text.count("\n", counted, begin), len(text) - begin)
        more = b"".join(itertools.islice(blocks, wanted)).decode("latin-1")
        text, position = text[start:] + more, position - start
        start = counted = 0
        # Twice as much each time, so that a long record is not looked at again for every block of it.
        whole, wanted = not more, wanted * 2


class _BrokenError(Exception):
    """The text is broken at a position so that the next record cannot be found."""

    def __init__(self, text: str, position: int, reason: str) -> None:
        rest = text[position : position + UNSURE].split("\n", 1)[0].encode("latin-1").decode("utf-8", "replace")
        super().__init__(f"{reason} {f'before {shown(rest)}' if rest else 'at the end'}; {MEND}")
        self.position = position


def _find_element(text: str, position: int, first: bool, whole: bool) -> tuple[int, int] | None:
    """Find the next element of a JSON list."""
    found = (OPENING if first else COMMA).match(text, position)
    begin = found.end() if found else _blank(text, position)
    if found and begin < len(text) and not (first and text[begin] == "]"):
        return _find_value(text, begin, whole)
    if text[begin : begin + 1] == "]":
        rest = _blank(text, begin + 1)
        if rest < len(text):
            raise _BrokenError(text, rest, "the list ends")
    elif begin < len(text):
        raise _BrokenError(text, begin, "not JSON: Expecting ',' delimiter")
    elif whole:
        raise _BrokenError(text, begin, "not JSON: the list is not closed")
    return None


def _find_object(text: str, position: int, first: bool, whole: bool) -> tuple[int, int] | None:
    """Find the next of JSON objects that stand one behind the other."""
    begin = _blank(text, position)
    return _find_value(text, begin, whole) if begin < len(text) else None


def _find_value(text: str, begin: int, whole: bool) -> tuple[int, int] | None:
    """Return begin and end of the JSON value that begins here."""
    try:
        end = DECODE(text, begin)[1]
    except json.JSONDecodeError as error:
        if not whole and error.msg.startswith("Unterminated"):
            return None
        raise _BrokenError(text, error.pos, f"not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise _BrokenError(text, begin, f"not JSON: {error}") from None
    # 1.5e+ is a number with something behind it, unless there is more to come.
    return (begin, end) if whole or end + len("e+") < len(text) else None


def _blank(text: str, position: int) -> int:
    """Return where the white space at a position ends."""
    return BLANK.match(text, position).end()  # type: ignore[union-attr]


@functools.cache
def _well_formed(delimiter: str) -> re.Pattern[str]:
    """Return the pattern of an RFC 4180 record: much faster than the csv module, and it never backtracks."""
    cell = rf'(?:"[^"]*+(?:""[^"]*+)*+"|[^"\r\n{delimiter}]*+)'
    return re.compile(rf"{cell}(?:{delimiter}{cell})*+\r?\n")


def _find_record(delimiter: str, text: str, position: int, first: bool, whole: bool) -> tuple[int, int] | None:
    """Find the next CSV record. What is not well formed ends where the csv module, which reads it later, says."""
    begin = EMPTY_LINES.match(text, position).end()  # type: ignore[union-attr]
    found = _well_formed(delimiter).match(text, begin)
    if found:
        return begin, found.end()
    end = begin

    def lines() -> Iterator[str]:
        nonlocal end
        while end < len(text):
            stop = text.find("\n", end) + 1
            if not stop and not whole:
                return
            start, end = end, stop or len(text)
            yield text[start:end]

    try:
        next(_csv_reader(lines(), delimiter))
    except StopIteration:
        return None
    except csv.Error as error:
        if not _unclosed(error):
            return begin, end
        if whole:
            raise _BrokenError(text, begin, "a quote is opened and never closed") from None
        return None
    return begin, end


def _csv_reader(lines: Iterator[str], delimiter: str) -> Any:
    csv.field_size_limit(2**31 - 1)
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _unclosed(error: csv.Error) -> bool:
    return str(error) == "unexpected end of data"


def _check_length(file: str, line: int, length: int) -> None:
    if length > LONGEST_ROW:
        raise UserError(f"{file}:{line}: a row begins here that is longer than {LONGEST_ROW >> 20} MiB; split it up")


def _tables(path: Path, kind: str, rows: int, size: int) -> Iterator[Chunk]:
    import pyarrow

    first = 1
    batches = _parquet_batches(path, rows, size) if kind == "parquet" else _arrow_batches(path)
    try:
        for batch, taken in batches:
            count = batch.num_rows
            _check_columns(path, batch.schema.names)
            step = max(1, min(rows, size * count // max(1, batch.nbytes)))
            for start in range(0, count, step):
                part = batch.slice(start, step)
                end = start + part.num_rows
                progress = taken * end // count - taken * start // count
                yield Chunk(str(path), kind, first, _ipc(part), progress)
                first += part.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: is not a whole {kind.capitalize()} file ({reason}); fetch or write it again"
        ) from None


def _check_columns(path: Path, names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: two columns are called {shown(twice)}; rename one")


def _parquet_batches(path: Path, rows: int, size: int) -> Iterator[tuple[Any, int]]:
    """Yield record batches, each with its share of the file in bytes."""
    from pyarrow.parquet import ParquetFile

    # So a column's pages are read one after the other; else those of a whole row group would be in memory at once.
    # Arrow's threads would have heaps of their own, and take the cores from the workers.
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
        # A stream that was cut between two batches reads like a whole one.
        if source.read_at(len(STREAM_END), length - len(STREAM_END)) != STREAM_END:
            raise pyarrow.ArrowInvalid("its end mark is missing")


def _sound(batch: Any) -> Any:
    """Return a batch if its offsets stay inside its buffers; Arrow would follow them anywhere."""
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):  # spoils a row, not the file
            raise
    return batch


def _ipc(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _json_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    for line, text in _lines(chunk):
        place = f"{chunk.file}:{line}"
        if isinstance(text, BadRow):
            yield place, text
            continue
        try:
            yield place, _object(json.loads(text))
        except json.JSONDecodeError as error:
            yield place, BadRow(f"is not JSON: {error.msg} at character {error.pos + 1}; write one object a line")
        except (ValueError, RecursionError) as error:
            yield place, BadRow(f"is not JSON that can be read: {error}; mend or remove it")


def _txt_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    for line, text in _lines(chunk):
        yield f"{chunk.file}:{line}", text if isinstance(text, BadRow) else {"text": text}


def _value_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    text, broken = _decoded(chunk.data)
    line, counted, position = chunk.first, 0, 0
    while position < len(text):
        begin = BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        line += text.count("\n", counted, begin)
        counted = begin
        value, position = DECODE(text, begin)
        bad = _not_utf8(text[begin:position], line) if broken else None
        yield f"{chunk.file}:{line}", bad or _object(value)


def _csv_rows(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    wanted = len(chunk.columns)
    for line, cells in _csv_records(chunk):
        value: Any = cells
        if not isinstance(cells, BadRow):
            value = dict(zip(chunk.columns, cells, strict=False))
            if len(cells) != wanted:
                value = BadRow(f"has {len(cells)} columns where the header has {wanted}; quote cells that hold them")
        yield f"{chunk.file}:{line}", value


def _csv_records(chunk: Chunk) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yield the cells of each record, with the number of the line it begins on."""
    text, broken = _decoded(chunk.data)
    taken: list[str] = []

    def lines() -> Iterator[str]:
        for line in io.StringIO(text, newline="\n"):
            taken.append(line)
            yield line

    reader = _csv_reader(lines(), DELIMITERS[chunk.kind])
    line = chunk.first
    while True:
        line += len(taken)
        taken.clear()
        value: list[str] | BadRow
        try:
            value = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = str(error).split(" - ")[0]
            value = BadRow(
                f"is not CSV (lines {line} to {line + len(taken) - 1}: {reason}); "
                "put such a cell in quotes, and write a quote in it twice"
            )
        bad = _not_utf8("".join(taken), line) if broken else None
        if value:
            yield line, bad or value


def _table_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    import pyarrow

    batch = pyarrow.ipc.open_stream(chunk.data).read_next_batch()
    try:
        values = batch.to_pylist()
    except (ValueError, OverflowError):
        values = [_table_row(batch.slice(number, 1)) for number in range(batch.num_rows)]
    for row, value in enumerate(values, chunk.first):
        yield f"{chunk.file}: row {row}", value


def _table_row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return BadRow(f"cannot be read: {error}; write it again, with texts as UTF-8")


def _lines(chunk: Chunk) -> Iterator[tuple[int, str | BadRow]]:
    """Yield the lines that are not blank, with their numbers."""
    text, broken = _decoded(chunk.data)
    for number, line in enumerate(text.split("\n"), chunk.first):
        if broken and (bad := _not_utf8(line, number)):
            yield number, bad
        elif line and not line.isspace():
            yield number, line.removesuffix("\r")


def _decoded(data: bytes) -> tuple[str, bool]:
    """Return text, and whether bytes in it were not UTF-8; each stands there as a lone surrogate."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="surrogateescape"), True


def _not_utf8(text: str, line: int) -> BadRow | None:
    """Return what is wrong with text that begins on this line; None if it was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[: error.start]
        byte = len(before.rpartition("\n")[2].encode()) + 1
        found = ord(text[error.start]) & 0xFF
        return BadRow(
            f"byte {byte} of line {line + before.count(chr(10))} (0x{found:02x}) is not UTF-8; save the file as UTF-8"
        )
    return None


def _object(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    found = "a list" if isinstance(value, list) else shown(value)
    return BadRow(f'is {found}; write an object, as in {{"instruction": ..., "output": ...}}')


_CUTS = {
    "json": _cut_json,
    "jsonl": _cut_lines,
    "ndjson": _cut_lines,
    "txt": _cut_lines,
    "csv": _cut_csv,
    "tsv": _cut_csv,
}
_RECORDS: dict[str, Callable[[Chunk], Iterator[tuple[str, Any]]]] = {
    "jsonl": _json_records,
    "ndjson": _json_records,
    "values": _value_records,
    "txt": _txt_records,
    "csv": _csv_rows,
    "tsv": _csv_rows,
    "parquet": _table_records,
    "arrow": _table_records,
}
