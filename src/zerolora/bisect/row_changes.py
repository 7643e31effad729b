"""The rows that differ between two versions of a data file: JSON lines, a JSON list, CSV or Parquet.

Each difference is one row that was changed, added or removed. A version with any of them is written from the rows as
both have them: the texts of JSON and CSV, the values of Parquet. Files of other kinds are not split, nor those whose
rows, written so, are not read as the same rows.
"""

import hashlib
import io
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zerolora.bisect.delta import Atom, State
from zerolora.bisect.revisions import GIT
from zerolora.data.example import BadRow
from zerolora.data.records import DELIMITERS, Chunk, csv_records
from zerolora.units import counted

Kind = Literal["changed", "added", "removed"]
KINDS: tuple[Kind, ...] = ("changed", "added", "removed")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class RowChange(NamedTuple):
    """A row that differs; hashable, as a change of delta.py is."""

    file: str
    number: int
    """Which difference of the file it is, from 0."""
    kind: Kind
    row: int
    """Number of the row in the good version, from 1; of an added row, in the bad version."""

    def __str__(self) -> str:
        return f"{self.file} row {self.row} {self.kind}"


class WrittenRows(NamedTuple):
    """The rows of a file."""

    keys: list[str]
    """A hash of each row's value, however it is written."""
    written: Sequence[Any]
    """Each row as the file has it."""
    head: Any
    """What is before all rows, which both versions must have alike."""
    join: Callable[[Any, list[Any]], bytes]
    """Returns the file of a head and rows."""


class RowPiece(NamedTuple):
    """A row as each version has it, None where it is missing; without a change they are alike."""

    good: Any
    bad: Any
    change: RowChange | None = None


@dataclass(frozen=True)
class RowDifference:
    """The two versions of a file."""

    good: bytes
    bad: bytes
    rows: WrittenRows
    """Of the good version."""
    pieces: Sequence[RowPiece]
    """In order."""

    @property
    def changes(self) -> list[RowChange]:
        """The rows that differ."""
        return [piece.change for piece in self.pieces if piece.change]

    def content(self, applied: State) -> bytes:
        """Return the file with some of the differences: with none or all of them, as git has it."""
        changes = frozenset(self.changes)
        if not changes & applied:
            return self.good
        if changes <= applied:
            return self.bad
        chosen = [piece.bad if piece.change in applied else piece.good for piece in self.pieces]
        return self.rows.join(self.rows.head, [row for row in chosen if row is not None])


def difference(file: str, good: bytes, bad: bytes) -> RowDifference | None:
    """Return the rows that differ; None if one of the versions cannot be split into rows, or if no row differs in its
    value."""
    before, after = _rows(file, good), _rows(file, bad)
    if before is None or after is None or before.head != after.head:
        return None
    both = _rows(file, before.join(before.head, [*before.written, *after.written]))
    if both is None or both.keys != before.keys + after.keys:
        return None
    pieces: list[RowPiece] = []
    here = number = 0
    for start, removed, start_after, added in _hunks(before.keys, after.keys):
        pieces += [RowPiece(row, row) for row in before.written[here:start]]
        for index in range(max(removed, added)):
            old = start + index if index < removed else None
            new = start_after + index if index < added else None
            kind: Kind = "added" if old is None else "removed" if new is None else "changed"
            row = (old if old is not None else start_after + index) + 1
            written = (None if old is None else before.written[old], None if new is None else after.written[new])
            pieces.append(RowPiece(*written, RowChange(file, number, kind, row)))
            number += 1
        here = start + removed
    pieces += [RowPiece(row, row) for row in before.written[here:]]
    return RowDifference(good, bad, before, pieces) if number else None


def atoms(rows: RowDifference) -> list[Atom]:
    """Return an atom for each kind of difference, which splits in halves down to single rows."""
    changes = rows.changes
    return [_halved(of_kind) for kind in KINDS if (of_kind := [each for each in changes if each.kind == kind])]


def _halved(changes: Sequence[RowChange]) -> Atom:
    """Return an atom of some rows; built from the single rows up."""
    if len(changes) == 1:
        return Atom(str(changes[0]), frozenset(changes))
    middle = len(changes) // 2
    parts = (_halved(changes[:middle]), _halved(changes[middle:]))
    first, last = changes[0], changes[-1]
    span = f"rows {first.row} to {last.row}"
    name = f"{first.file} {counted(len(changes), 'row')} {first.kind}, among {span}"
    return Atom(name, frozenset(changes), parts, halves=True)


def _rows(file: str, content: bytes) -> WrittenRows | None:
    """Return the rows of a file; None if it is of another kind, or broken."""
    kind = file.rpartition(".")[2].lower()
    try:
        if kind == "parquet":
            return _of_parquet(content)
        return _of_csv(kind, content) if kind in DELIMITERS else _of_json(content)
    except (ValueError, RecursionError, OSError, OverflowError, NotImplementedError):  # some are pyarrow's
        return None


def _of_json(content: bytes) -> WrittenRows | None:
    text = content.decode()
    if text.lstrip().startswith("["):
        texts = list(_elements(text))
        return WrittenRows([_hash(json.loads(each)) for each in texts], texts, "[", _joined_list)
    texts = [line for line in text.split("\n") if line.strip()]
    values = [json.loads(line) for line in texts]
    if not all(isinstance(value, dict) for value in values):
        return None
    return WrittenRows([_hash(value) for value in values], texts, "", lambda head, rows: _joined(head, rows, "\n"))


def _joined_list(_: str, rows: list[str]) -> bytes:
    return ("[\n" + ",\n".join(rows) + "\n]\n").encode()


def _joined(head: str, rows: list[str], end: str) -> bytes:
    return "".join([head, *(f"{row}{end}" for row in rows)]).encode()


def _of_csv(kind: str, content: bytes) -> WrittenRows | None:
    """Return the rows as their texts, with their quotes; the head is the header."""
    lines = list(io.StringIO(content.decode(), newline="\n"))
    records = list(csv_records(Chunk("", kind, data=content)))
    if not records or any(isinstance(cells, BadRow) for _, cells in records):
        return None
    begins = [line - 1 for line, _ in records]
    header, *texts = ("".join(lines[begin:end]) for begin, end in itertools.pairwise([*begins, len(lines)]))
    end = "\r\n" if header.endswith("\r\n") else "\n"
    rows = [text.rstrip("\r\n") for text in texts]
    keys = [_hash(cells) for _, cells in records[1:]]
    return WrittenRows(keys, rows, header.rstrip("\r\n") + end, lambda head, rows: _joined(head, rows, end))


def _of_parquet(content: bytes) -> WrittenRows:
    """Return the rows as a table and a number in it; the head is the schema. What pandas notes there of its index says
    how many rows there are, and nothing here reads it."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(pyarrow.BufferReader(content)).read(use_threads=False)
    notes = {key: value for key, value in (table.schema.metadata or {}).items() if key != b"pandas"}
    table = table.replace_schema_metadata(notes)
    keys = [_hash(repr(row)) for row in table.to_pylist()]
    head = (table.schema.to_string(truncate_metadata=False, show_schema_metadata=False), sorted(notes.items()))
    empty = table.slice(0, 0)
    return WrittenRows(
        keys, [(table, number) for number in range(len(keys))], head, lambda _, rows: _joined_parquet(empty, rows)
    )


def _joined_parquet(empty: Any, rows: list[tuple[Any, int]]) -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    parts: list[list[Any]] = []  # rows that follow one another: table, number of the first one, their number
    for table, number in rows:
        if parts and parts[-1][0] is table and sum(parts[-1][1:]) == number:
            parts[-1][2] += 1
        else:
            parts.append([table, number, 1])
    written = io.BytesIO()
    write_table(pyarrow.concat_tables([empty, *(table.slice(*span) for table, *span in parts)]), written)
    return written.getvalue()


def _elements(text: str) -> Iterator[str]:
    """Yield the texts of the elements of a JSON list. Raises ValueError if it is not one."""
    decoder, blank = json.JSONDecoder(), re.compile(r"\s*")
    position = text.index("[") + 1
    while True:
        position = blank.match(text, position).end()  # type: ignore[union-attr] # matches anything
        if text[position : position + 1] == "]":
            break
        _, end = decoder.raw_decode(text, position)
        yield text[position:end]
        position = blank.match(text, end).end()  # type: ignore[union-attr]
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise ValueError("no list")
        position += 1
    if text[position + 1 :].strip():
        raise ValueError("more than a list")


def _hunks(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, count, start after, count after) of each place where two lists of hashes differ, as git finds them,
    which takes time linear in the rows where few differ."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("good", "bad")]
        for file, rows in zip(files, (before, after), strict=True):
            file.write_text("".join(f"{row}\n" for row in rows))
        command = [*GIT, "diff", "--no-index", "--no-ext-diff", "--unified=0", "--histogram", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    for line in done.stdout.splitlines():
        if match := HUNK.match(line):
            start, count, start_after, count_after = (1 if each is None else int(each) for each in match.groups())
            # Of no lines, git names the line before.
            yield start - (count > 0), count, start_after - (count_after > 0), count_after


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
