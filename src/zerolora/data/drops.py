"""Rows that were dropped: how many, for which reasons, and the first of each reason with its file and line."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zerolora.data.tokenize import Dropped, Result
from zerolora.errors import UserError

FEW = 0.1  # the part of a file's rows that may be of another form and be dropped
SHOWN = 3  # reasons that a line names
MOST = 50  # reasons that are counted one by one
LONGEST = 200  # characters of a reason in a line
# What differs between rows with the same mistake: quoted values and numbers.
VALUES = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d[\d,]*")


class _Reason(NamedTuple):
    rows: int
    first: Dropped


@dataclass
class _File:
    """The rows of one file: read, bad, and of another form than the source's (the first of them, and how many)."""

    name: str
    read: int = 0
    bad: int = 0
    first: str = ""
    other: int = 0
    first_other: str = ""

    def add(self, row: Dropped) -> None:
        if row.kind == "bad_row":
            self.bad += 1
            self.first = self.first or _first(row)
        if row.form:
            self.other += 1
            self.first_other = self.first_other or f"{row.place}: {row.reason}"


class Drops:
    """Counts dropped rows by reason, over all files and for each file. `listed` is the file that lists them."""

    def __init__(self, listed: Path) -> None:
        self.listed, self.read, self.rows = listed, 0, 0
        self._reasons: dict[tuple[str, str], _Reason] = {}
        self._file = _File("")

    def add(self, result: Result) -> None:
        """Count the rows of a chunk. Raises UserError as `end_of_file` does, for the file before it."""
        if result.origin != self._file.name:
            self.end_of_file()
            self._file = _File(result.origin)
        self.read += result.read
        self.rows += len(result.dropped)
        self._file.read += result.read
        for row in result.dropped:
            self._file.add(row)
            key = row.kind, VALUES.sub("_", row.reason)
            if key in self._reasons or len(self._reasons) < MOST:
                before = self._reasons.get(key, _Reason(0, row))
                self._reasons[key] = before._replace(rows=before.rows + 1)

    def end_of_file(self) -> None:
        """Raise UserError if the file that was read last holds something else than its source says: every row is bad,
        or many are of another form. `bad_row: drop` is meant for single rows."""
        file = self._file
        if file.other > FEW * file.read:
            raise UserError(
                f"{file.first_other} (bad_row: drop would drop {file.other:,} of the {file.read:,} rows of {file.name})"
            )
        if file.bad == file.read > 1:
            raise UserError(
                f"{file.name}: none of its {file.read:,} rows can be used, the first is {file.first}; correct them, or "
                "leave the file out of the folder or of sources"
            )

    def line(self) -> str:
        """Return how many rows were dropped, by which reason, and the first of each; empty if none was."""
        if not self.rows:
            return ""
        reasons = sorted(self._reasons.values(), key=lambda reason: -reason.rows)
        parts = [f"{each.rows:,} as {each.first.kind}, the first {_first(each.first)}" for each in reasons[:SHOWN]]
        others = self.rows - sum(each.rows for each in reasons[:SHOWN])
        return (
            f"{self.rows:,} of {self.read:,} rows that were read are dropped ({'; '.join(parts)}"
            f"{f'; {others:,} for other reasons' if others else ''}), all listed in {self.listed}"
        )


def _first(row: Dropped) -> str:
    reason = row.reason if len(row.reason) <= LONGEST else row.reason[: LONGEST - 3] + "..."
    return f"{row.place}: {reason}"
