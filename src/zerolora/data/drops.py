"""Rows that were dropped: how many, for which reasons, and the first of each reason with its file and line."""

import re
from pathlib import Path
from typing import NamedTuple

from zerolora.data.tokenize import Dropped, Result
from zerolora.errors import UserError

SHOWN = 3  # reasons that a line names
MOST = 50  # reasons that are counted one by one
LONGEST = 200  # characters of a reason in a line
# What differs between rows with the same mistake: quoted values and numbers.
VALUES = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d[\d,]*")


class _Reason(NamedTuple):
    rows: int
    first: Dropped


class Drops:
    """Counts dropped rows by reason, over all files and for each file. `listed` is the file that lists them."""

    def __init__(self, listed: Path) -> None:
        self.listed, self.read, self.rows = listed, 0, 0
        self._reasons: dict[tuple[str, str], _Reason] = {}
        self._file, self._file_read, self._file_bad, self._file_first = "", 0, 0, ""

    def add(self, result: Result) -> None:
        """Count the rows of a chunk. Raises UserError if the file before it had no row that can be used."""
        if result.origin != self._file:
            self.end_of_file()
            self._file, self._file_read, self._file_bad, self._file_first = result.origin, 0, 0, ""
        self.read += result.read
        self.rows += len(result.dropped)
        bad = [row for row in result.dropped if row.kind == "bad_row"]
        self._file_read += result.read
        self._file_bad += len(bad)
        if bad and not self._file_first:
            self._file_first = _first(bad[0])
        for row in result.dropped:
            key = row.kind, VALUES.sub("_", row.reason)
            if key in self._reasons or len(self._reasons) < MOST:
                before = self._reasons.get(key, _Reason(0, row))
                self._reasons[key] = before._replace(rows=before.rows + 1)

    def end_of_file(self) -> None:
        """Raise UserError if every row of the file that was read last is bad: such a file is of another kind than its
        source says, and bad_row: drop is meant for single rows."""
        if self._file_bad == self._file_read > 1:
            raise UserError(
                f"{self._file}: none of its {self._file_read:,} rows can be used, the first is "
                f"{self._file_first}; correct them, or leave the file out of the folder or of sources"
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
