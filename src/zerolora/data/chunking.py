"""Splits streams of text into chunks at row boundaries: after lines, JSON values, or CSV records."""

import csv
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator

from zerolora.data.example import BadRow
from zerolora.data.records import (
    BETWEEN,
    DECODE,
    DELIMITERS,
    Chunk,
    csv_reader,
    csv_records,
    end_of,
    reason_of,
    unreadable,
)
from zerolora.errors import UserError, shown

# Without a limit, an unclosed list or quote would read the rest of the file into memory.
LONGEST_ROW = 1 << 28
# An error this close to the end of the text may disappear with more of it (half a literal, an escape, a number).
# Messages quote as many characters.
UNSURE = 32
WHITE = b" \t\r\n"
BLANK = re.compile(r"[ \t\r\n]*")
OPEN_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+\\?\Z', re.DOTALL)  # a JSON string that the text ends in
OPENING = re.compile(r"[ \t\r\n]*\[[ \t\r\n]*")
COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
EMPTY_LINES = re.compile(r"(?:\r?\n)*")
REMEDY = "correct it, since the rows after it cannot be read otherwise"
# (text, position, first record?, text reaches the end of the file?) -> the record's begin and end; None if the text
# contains no further complete record.
Find = Callable[[str, int, bool, bool], tuple[int, int] | None]


def _head(chunk: Chunk, blocks: Iterator[bytes], bracket: bytes) -> tuple[bytes, bytes]:
    """Read blocks until one is not blank, and until the line ends if it starts with `bracket`; return the text, and
    the same without leading white space."""
    head, wanted = b"", 1
    while not (start := head.lstrip(WHITE)) or (start.startswith(bracket) and b"\n" not in start):
        more = b"".join(itertools.islice(blocks, wanted))
        if not more:
            break
        head, wanted = head + more, wanted * 2
        _check_length(chunk.file, 1, len(head))
    return head, start


def _cut_objects(chunk: Chunk, blocks: Iterator[bytes], rows: int, size: int) -> Iterator[Chunk]:
    """Split a file with an object a line after line breaks. Raises UserError for a list over several lines."""
    head, start = _head(chunk, blocks, b"[")
    line = start.split(b"\n", 1)[0]
    if line.startswith(b"[") and _goes_on(line.decode("latin-1")):
        number = 1 + head[: len(head) - len(start)].count(b"\n")
        raise UserError(
            f"{chunk.file}:{number}: begins a list, but a .{chunk.kind} file holds one object a line; call it .json, "
            "or remove the brackets and the commas between objects"
        )
    yield from _cut_lines(chunk, itertools.chain([head], blocks), rows, size)


def _cut_lines(chunk: Chunk, blocks: Iterator[bytes], rows: int, size: int) -> Iterator[Chunk]:
    """Split after line breaks."""
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
    """Split complete lines into parts of at most `rows` lines; yield each with its number of lines."""
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
    """Split a JSON list after elements, and a file of objects after lines or, if they span lines, after objects."""
    head, start = _head(chunk, blocks, b"{")
    if not start:
        return
    line = 1 + head[: -len(start)].count(b"\n")
    blocks = itertools.chain([head], blocks)
    if start.startswith(b"["):
        yield from _cut(chunk._replace(kind="values"), blocks, _find_element, rows, size)
    elif not start.startswith(b"{"):
        result = shown(start[:20].splitlines()[0].decode("utf-8", "replace"))
        raise UserError(f"{chunk.file}:{line}: begins with {result}; write a list of objects, or an object a line")
    elif _goes_on(start.split(b"\n", 1)[0].decode("latin-1")):
        yield from _cut(chunk._replace(kind="values"), blocks, _find_object, rows, size)
    else:
        yield from _cut_lines(chunk._replace(kind="jsonl"), blocks, rows, size)


def _goes_on(line: str) -> bool:
    """Return whether a JSON value begins on this line and continues on the next."""
    try:
        DECODE(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.rstrip())
    except (ValueError, RecursionError):
        return False
    return False


def _cut_csv(chunk: Chunk, blocks: Iterator[bytes], rows: int, size: int) -> Iterator[Chunk]:
    """Split after records, whose quoted cells may contain line breaks. The first record is the header."""
    find = functools.partial(_find_record, DELIMITERS[chunk.kind])
    result = _cut(chunk, blocks, find, rows, size, header=True)
    for header in itertools.islice(result, 1):
        columns = _header(header)
        for part in result:
            yield part._replace(columns=columns)


def _header(chunk: Chunk) -> tuple[str, ...]:
    (_, cells), *_ = csv_records(chunk)
    where = f"{chunk.file}:{chunk.first}"
    if isinstance(cells, BadRow):
        raise UserError(f"{where}: the header {cells}")
    seen: set[str] = set()
    if not cells[0] and len(cells) > 1:
        # The index of pandas' to_csv(), with the name that read_csv assigns.
        cells = ["Unnamed: 0", *cells[1:]]
        while cells[0] in cells[1:]:
            cells[0] += ".1"
    for number, cell in enumerate(cells, 1):
        if not cell.strip():
            raise UserError(f"{where}: column {number} has no name; the first line must name every column")
        if cell in seen:
            raise UserError(f"{where}: two columns are called {shown(cell)}; rename one")
        seen.add(cell)
    return tuple(cells)


def _cut(
    chunk: Chunk, blocks: Iterator[bytes], find: Find, rows: int, size: int, header: bool = False
) -> Iterator[Chunk]:
    """Split after records of any form; a header becomes a separate chunk.

    Bytes are decoded as Latin-1: the syntax of JSON and CSV is ASCII, and positions in the text are those in the file.
    """
    text, whole, wanted = "", False, 1
    line, counted = 1, 0  # the line number of text[counted]
    start = position = count = 0
    first = True
    while True:
        try:
            result = find(text, position, first, whole)
        except _BrokenError as error:
            if whole or error.position + UNSURE <= len(text):
                line += text.count("\n", counted, error.position)
                raise UserError(f"{chunk.file}:{line}: {error}") from None
            result = None
        if result:
            begin, position = result
            if not count:
                line += text.count("\n", counted, begin)
                start = counted = begin
            count += 1
        if count and (count == (1 if header else rows) or position - start >= size or (whole and not result)):
            yield chunk._replace(first=line, data=text[start:position].encode("latin-1"))
            count, header = 0, False
        if result:
            first, wanted = False, 1
            continue
        if whole:
            return
        # Drop blank lines, which might fill the memory.
        blank = end_of(EMPTY_LINES, text, position)
        if count and blank - position >= size:
            yield chunk._replace(first=line, data=text[start:position].encode("latin-1"))
            count = 0
        if not count:
            wanted = wanted if blank == position else 1
            line += text.count("\n", counted, blank)
            start = counted = position = blank
        begin = end_of(BETWEEN, text, position)
        _check_length(chunk.file, line + text.count("\n", counted, begin), len(text) - position)
        more = b"".join(itertools.islice(blocks, wanted)).decode("latin-1")
        text, position = text[start:] + more, position - start
        start = counted = 0
        # Double the number of blocks, so that a long record is not scanned again for each.
        whole, wanted = not more, wanted * 2


class _BrokenError(Exception):
    """A syntax error that hides the begin of the next record."""

    def __init__(self, text: str, position: int, reason: str) -> None:
        rest = text[position : position + UNSURE].split("\n", 1)[0].encode("latin-1").decode("utf-8", "replace")
        super().__init__(f"{reason} {f'before {shown(rest)}' if rest else 'at the end'}; {REMEDY}")
        self.position = position


def _find_element(text: str, position: int, first: bool, whole: bool) -> tuple[int, int] | None:
    """Locate the next element of a JSON list."""
    matched = (OPENING if first else COMMA).match(text, position)
    begin = matched.end() if matched else end_of(BLANK, text, position)
    if matched and begin < len(text) and not (first and text[begin] == "]"):
        return _find_value(text, begin, whole)
    if text[begin : begin + 1] == "]":
        rest = end_of(BLANK, text, begin + 1)
        if rest < len(text):
            raise _BrokenError(text, rest, "the list ends")
    elif begin < len(text):
        raise _BrokenError(text, begin, "not JSON: Expecting ',' delimiter")
    elif whole:
        raise _BrokenError(text, begin, "not JSON: the list is not closed")
    return None


def _find_object(text: str, position: int, first: bool, whole: bool) -> tuple[int, int] | None:
    """Locate the next of several concatenated JSON objects."""
    begin = end_of(BLANK, text, position)
    return _find_value(text, begin, whole) if begin < len(text) else None


def _find_value(text: str, begin: int, whole: bool) -> tuple[int, int] | None:
    """Return begin and end of the JSON value at `begin`."""
    try:
        end = DECODE(text, begin)[1]
    except json.JSONDecodeError as error:
        if not whole and OPEN_STRING.match(text, error.pos):
            return None
        raise _BrokenError(text, error.pos, f"not JSON: {reason_of(error)}") from None
    except (ValueError, RecursionError) as error:
        raise _BrokenError(text, begin, f"not JSON: {unreadable(error)}") from None
    # The decoder ends 1.5e+ after the 5; further text may extend the number.
    return (begin, end) if whole or end + len("e+") < len(text) else None


@functools.cache
def _well_formed(delimiter: str) -> re.Pattern[str]:
    """Return a pattern of RFC 4180 records, much faster than the csv module and without backtracking."""
    cell = rf'(?:"[^"]*+(?:""[^"]*+)*+"|[^"\r\n{delimiter}]*+)'
    return re.compile(rf"{cell}(?:{delimiter}{cell})*+\r?\n")


def _find_record(delimiter: str, text: str, position: int, first: bool, whole: bool) -> tuple[int, int] | None:
    """Locate the next CSV record. The csv module decides the end of a malformed record, since it reads it later."""
    begin = end_of(EMPTY_LINES, text, position)
    matched = _well_formed(delimiter).match(text, begin)
    if matched:
        return begin, matched.end()
    end, exhausted = begin, False

    def lines() -> Iterator[str]:
        nonlocal end, exhausted
        while end < len(text):
            stop = text.find("\n", end) + 1
            if not stop and not whole:
                break
            start, end = end, stop or len(text)
            yield text[start:end]
        exhausted = True

    try:
        next(csv_reader(lines(), delimiter))
    except StopIteration:
        return None
    except csv.Error:
        # The reader requests another line only while a quote is open.
        if not exhausted:
            return begin, end
        if whole:
            raise _BrokenError(text, begin, "a quote is opened and never closed") from None
        return None
    return begin, end


def _check_length(file: str, line: int, length: int) -> None:
    if length > LONGEST_ROW:
        raise UserError(f"{file}:{line}: a row begins here that is longer than {LONGEST_ROW >> 20} MiB; split it up")


CUTS = {
    "json": _cut_json,
    "jsonl": _cut_objects,
    "ndjson": _cut_objects,
    "txt": _cut_lines,
    "csv": _cut_csv,
    "tsv": _cut_csv,
}
