"""Chunks of data files, and how their rows are decoded."""

import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zerolora.data.example import BadRow
from zerolora.errors import shown
from zerolora.json_file import repeated
from zerolora.units import counted

DELIMITERS = {"csv": ",", "tsv": "\t"}
BETWEEN = re.compile(r"[ \t\r\n,]*")
DECODE = json.JSONDecoder().raw_decode


class TwiceError(Exception):
    """An object has a key twice. Not a ValueError, which the decoder would treat as its own."""

    def __init__(self, key: str) -> None:
        super().__init__(f"has the key {shown(key)} twice in one object, of which one value would be lost; remove one")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises TwiceError for a repeated key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise TwiceError(repeated(name for name, _ in pairs))
    return result


CARRIAGE_RETURNS = "carriage returns as line ends, as of old Macs; convert them to line feeds"
STRICT = json.JSONDecoder(object_pairs_hook=_once)


class WrittenObject(dict[str, Any]):
    """An object from JSON in a table: its nulls are real, while those of a struct may be filled in."""


WRITTEN = json.JSONDecoder(object_pairs_hook=lambda pairs: WrittenObject(_once(pairs)))


class Chunk(NamedTuple):
    """Undecoded rows of a file. first: the number of the first line (in tables: row), from 1. progress: the chunk's
    bytes on disk, about the file's size in total. columns: the header of a CSV file."""

    file: str
    kind: str
    first: int = 1
    data: bytes = b""
    progress: int = 0
    columns: tuple[str, ...] = ()

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield each row's place for messages, as in rows.jsonl:12, and its value: a dict, or a BadRow."""
        return RECORDS[self.kind](self)


def _json_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    for line, text in _lines(chunk):
        place = f"{chunk.file}:{line}"
        if isinstance(text, BadRow):
            yield place, text
            continue
        try:
            yield place, _object(_loaded(text), text)
        except json.JSONDecodeError as error:
            yield place, _no_json(error, text)
        except TwiceError as error:
            yield place, BadRow(str(error))
        except (ValueError, RecursionError) as error:
            yield place, BadRow(f"is not JSON that can be read: {unreadable(error)}; fix or remove it")


def _loaded(text: str) -> Any:
    """Decode as STRICT.decode does, which is slower for an object without surrounding white space."""
    if text[0] == "{":
        value, end = STRICT.raw_decode(text)
        if end == len(text):
            return value
    return STRICT.decode(text)


def _no_json(error: json.JSONDecodeError, text: str) -> BadRow:
    if error.msg == "Extra data" and text[error.pos :].strip() == ",":
        return BadRow(
            "ends with a comma, but a line holds one object alone; remove it, or make the file a list, with [ and ] "
            "around all lines and a name that ends in .json"
        )
    if error.msg == "Extra data" and "\r" in text[: error.pos]:
        return BadRow(f"has {CARRIAGE_RETURNS}")
    return BadRow(f"is not JSON: {reason_of(error)} at character {error.pos + 1}; write one object a line")


def unreadable(error: ValueError | RecursionError) -> str:
    """Return why Python cannot hold a value that is JSON."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return f"a number has more than {sys.get_int_max_str_digits():,} digits"


def reason_of(error: json.JSONDecodeError) -> str:
    """Return the decoder's message without its dangling preposition."""
    return error.msg.removesuffix(" at").removesuffix(" starting")


def _decode(text: str, begin: int) -> tuple[Any, int]:
    """Return a value, or a BadRow for a repeated key, and its end."""
    # The value was decoded once to locate its end, on a stack that may have been less deep.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 1000)
    try:
        return STRICT.raw_decode(text, begin)
    except TwiceError as error:
        return BadRow(str(error)), DECODE(text, begin)[1]
    finally:
        sys.setrecursionlimit(limit)


def end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return the end of the match at a position, of a pattern that may match an empty text."""
    match = pattern.match(text, position)
    assert match
    return match.end()


def _txt_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    for line, text in _lines(chunk):
        value = text if isinstance(text, BadRow) else {"text": text}
        if isinstance(text, str) and "\r" in text and b"\n" not in chunk.data.rstrip():
            value = BadRow(f"has {CARRIAGE_RETURNS}")
        yield f"{chunk.file}:{line}", value


def _value_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    text, broken = _decoded(chunk.data)
    line, counted, position = chunk.first, 0, 0
    while position < len(text):
        begin = end_of(BETWEEN, text, position)
        line += text.count("\n", counted, begin)
        counted = begin
        value, position = _decode(text, begin)
        bad = _not_utf8(text[begin:position], line) if broken else None
        yield f"{chunk.file}:{line}", bad or _object(value, text[begin:position])


def _csv_rows(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    wanted = len(chunk.columns)
    for line, cells in csv_records(chunk):
        value: Any = cells
        if not isinstance(cells, BadRow):
            value = dict(zip(chunk.columns, cells, strict=False))
            if len(cells) != wanted:
                value = BadRow(
                    f"has {counted(len(cells), 'column')} where the header has {wanted}; quote cells that hold them"
                )
        yield f"{chunk.file}:{line}", value


def csv_records(chunk: Chunk) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Yield the line number and the cells of each record."""
    text, broken = _decoded(chunk.data)
    taken: list[str] = []

    def lines() -> Iterator[str]:
        for line in io.StringIO(text, newline="\n"):
            taken.append(line)
            yield line

    reader = csv_reader(lines(), DELIMITERS[chunk.kind])
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


def csv_reader(lines: Iterator[str], delimiter: str) -> Any:
    """Return a strict CSV reader of lines, without a limit on the length of cells."""
    csv.field_size_limit(2**31 - 1)
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _table_records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    import pyarrow

    batch = pyarrow.ipc.open_stream(chunk.data).read_next_batch()
    try:
        values = batch.to_pylist()
    except (ValueError, OverflowError):
        values = []
        for number in range(batch.num_rows):
            try:
                values += batch.slice(number, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                values.append(BadRow(f"cannot be read: {error}; write it again, with texts as UTF-8"))
    if any(pyarrow.types.is_floating(kind) for kind in batch.schema.types):
        values = [_without_nans(value) if isinstance(value, dict) else value for value in values]
    if decoders := {field.name: decode for field in batch.schema if (decode := _json_in(field.type))}:
        values = [_decoded_json(value, decoders) if isinstance(value, dict) else value for value in values]
    for row, value in enumerate(values, chunk.first):
        yield f"{chunk.file}: row {row}", value


def _json_in(kind: Any) -> Callable[[Any], Any] | None:
    """Return a decoder of the JSON inside values of an Arrow type, None without JSON. `datasets` stores objects with
    varying keys as JSON."""
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else WRITTEN.decode(value)
    if types.is_struct(kind):
        inner = {field.name: decode for field in kind if (decode := _json_in(field.type))}
        return (lambda value: value and {**value, **_each(value, inner)}) if inner else None
    if types.is_map(kind):
        of_item = _json_in(kind.item_type)
        return (lambda value: value and [(key, of_item(held)) for key, held in value]) if of_item else None
    of_value = _json_in(kind.value_type) if hasattr(kind, "value_type") else None
    if types.is_dictionary(kind):
        return of_value
    return (lambda value: value and [of_value(each) for each in value]) if of_value else None


def _each(value: dict[str, Any], decoders: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {name: decode(value[name]) for name, decode in decoders.items()}


def _decoded_json(row: dict[str, Any], decoders: dict[str, Callable[[Any], Any]]) -> Any:
    try:
        return {**row, **_each(row, decoders)}
    except json.JSONDecodeError as error:
        return BadRow(
            f"holds {shown(error.doc)} as JSON, which it is not: {reason_of(error)} at character {error.pos + 1}; "
            "write the table again"
        )
    except TwiceError as error:
        return BadRow(str(error))
    except (ValueError, RecursionError) as error:
        return BadRow(f"holds JSON that cannot be read: {unreadable(error)}; write the table again")


def _lines(chunk: Chunk) -> Iterator[tuple[int, str | BadRow]]:
    """Yield the non-blank lines with their numbers."""
    text, broken = _decoded(chunk.data)
    for number, line in enumerate(text.split("\n"), chunk.first):
        if broken and (bad := _not_utf8(line, number)):
            yield number, bad
        elif line and not line.isspace():
            yield number, line.removesuffix("\r")


def _decoded(data: bytes) -> tuple[str, bool]:
    """Decode UTF-8; return the text, with a lone surrogate for each invalid byte, and whether there is one."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="surrogateescape"), True


def _not_utf8(text: str, line: int) -> BadRow | None:
    """Return the error of a text that begins on this line, None if it is valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[: error.start]
        byte = len(before.rpartition("\n")[2].encode()) + 1
        result = ord(text[error.start]) & 0xFF
        return BadRow(
            f"byte {byte} of line {line + before.count(chr(10))} (0x{result:02x}) is not UTF-8; save the file as UTF-8"
        )
    return None


def _object(value: Any, text: str) -> Any:
    """Return an object as a row, or a BadRow. A column with NaN is absent: pandas and json.dumps write it for a missing
    text."""
    if isinstance(value, dict):
        return _without_nans(value) if "NaN" in text else value
    if isinstance(value, BadRow):
        return value
    result = "a list" if isinstance(value, list) else shown(value)
    return BadRow(f'is {result}; write an object, as in {{"instruction": ..., "output": ...}}')


def _without_nans(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


RECORDS: dict[str, Callable[[Chunk], Iterator[tuple[str, Any]]]] = {
    "jsonl": _json_records,
    "ndjson": _json_records,
    "values": _value_records,
    "txt": _txt_records,
    "csv": _csv_rows,
    "tsv": _csv_rows,
    "parquet": _table_records,
    "arrow": _table_records,
}
