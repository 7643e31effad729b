"""The rows that differ between two versions of a data file: JSON lines, or a JSON list.

Each difference is one row that was changed, added or removed. A version with any of them is written from the texts of
the rows in both. Files of other kinds are not split.
"""

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from zerolora.bisect.delta import Atom, State
from zerolora.bisect.revisions import GIT
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


class RowTexts(NamedTuple):
    """The rows of a file as they are written, and how it is written."""

    texts: list[str]
    is_list: bool
    """Whether it is one JSON list, not a row a line."""


@dataclass(frozen=True)
class RowDifference:
    """The two versions of a file."""

    good: bytes
    bad: bytes
    is_list: bool
    pieces: Sequence[str | tuple[RowChange, str | None, str | None]]
    """In order: the text of a row of both, or a difference with the row's text in each, None where it is missing."""

    @property
    def changes(self) -> list[RowChange]:
        """The rows that differ."""
        return [piece[0] for piece in self.pieces if not isinstance(piece, str)]

    def content(self, applied: State) -> bytes:
        """Return the file with some of the differences: with none or all of them, as git has it."""
        changes = frozenset(self.changes)
        if not changes & applied:
            return self.good
        if changes <= applied:
            return self.bad
        rows = [row for row in self._chosen(applied) if row is not None]
        if self.is_list:
            return ("[\n" + ",\n".join(rows) + "\n]\n").encode()
        return "".join(f"{row}\n" for row in rows).encode()

    def _chosen(self, applied: State) -> Iterator[str | None]:
        for piece in self.pieces:
            if isinstance(piece, str):
                yield piece
            else:
                change, before, after = piece
                yield after if change in applied else before


def difference(file: str, good: bytes, bad: bytes) -> RowDifference | None:
    """Return the rows that differ; None if one of the versions is not rows of JSON, or if no row differs in its
    value."""
    before, after = _rows(good), _rows(bad)
    if before is None or after is None or before.is_list != after.is_list:
        return None
    pieces: list[str | tuple[RowChange, str | None, str | None]] = []
    here = number = 0
    for start, removed, start_after, added in _hunks(before.texts, after.texts):
        pieces += before.texts[here:start]
        for index in range(max(removed, added)):
            old = start + index if index < removed else None
            new = start_after + index if index < added else None
            kind: Kind = "added" if old is None else "removed" if new is None else "changed"
            row = (old if old is not None else start_after + index) + 1
            texts = (None if old is None else before.texts[old], None if new is None else after.texts[new])
            pieces.append((RowChange(file, number, kind, row), *texts))
            number += 1
        here = start + removed
    pieces += before.texts[here:]
    return RowDifference(good, bad, before.is_list, pieces) if number else None


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


def _rows(content: bytes) -> RowTexts | None:
    """Return the rows of a file; None if they are not JSON."""
    try:
        text = content.decode()
        if text.lstrip().startswith("["):
            return RowTexts(list(_elements(text)), is_list=True)
        lines = [line for line in text.split("\n") if line.strip()]
        return RowTexts(lines, is_list=False) if all(isinstance(json.loads(line), dict) for line in lines) else None
    except (ValueError, RecursionError):
        return None


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
    """Yield (start, count, start after, count after) of each place where two lists of rows differ in their values, as
    git finds them, which takes time linear in the rows where few differ."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("good", "bad")]
        for file, rows in zip(files, (before, after), strict=True):
            file.write_text("".join(f"{_key(row)}\n" for row in rows))
        command = [*GIT, "diff", "--no-index", "--no-ext-diff", "--unified=0", "--histogram", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    for line in done.stdout.splitlines():
        if match := HUNK.match(line):
            start, count, start_after, count_after = (1 if each is None else int(each) for each in match.groups())
            # Of no lines, git names the line before.
            yield start - (count > 0), count, start_after - (count_after > 0), count_after


def _key(row: str) -> str:
    """Return a hash of a row's value, whatever its spaces are."""
    return hashlib.sha256(json.dumps(json.loads(row)).encode()).hexdigest()
