"""Statistics of a data set: rows, lengths, sources, truncated rows, and the reasons of dropped rows."""

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolora.data.formats.reading import Seen
from zerolora.data.prepared_rows import SPLITS
from zerolora.data.tokenize import Dropped, Result
from zerolora.errors import UserError, shown
from zerolora.files import write_text

BINS = 40
NAMES = 1000  # columns and keys that are counted separately
OTHERS = "others"
SHOWN_NAMES = 8  # in a message
FEW = 0.1  # maximum share of a file's rows that may be of another form and be dropped
SHOWN_REASONS = 3  # in a message
REASONS = 50  # that are counted separately
LONGEST = 200  # characters of a reason in a message
# Quoted values and numbers, which differ between rows with the same mistake.
VALUES = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d[\d,]*")


class _Reason(NamedTuple):
    rows: int
    first: Dropped


@dataclass
class _File:
    """The rows of one file: read, bad, and of another form than the source's, with the first of the latter two."""

    name: str
    read: int = 0
    bad: int = 0
    first: str = ""
    other: int = 0
    first_other: str = ""


class Statistics:
    """Counts that are accumulated chunk by chunk.

    listed: the file that lists dropped rows. lengths: tokens of each row, by split. columns: number of rows of each
    source that have a column mapped in the config.
    """

    def __init__(self, sources: list[str], listed: Path) -> None:
        self.sources, self.listed = sources, listed
        self.counts: dict[str, int] = {}
        self.by_source = [dict.fromkeys(("read_rows", "excluded_rows", "dropped_rows"), 0) for _ in sources]
        self.columns: list[Counter[str]] = [Counter() for _ in sources]
        self.seen: list[Seen] = [Seen() for _ in sources]
        self.read = 0
        self.dropped = {"bad_row": 0, "too_long": 0}
        self._reasons: dict[tuple[str, str], _Reason] = {}
        self._file = _File("")
        self.cut = dict.fromkeys(("rows.truncated", "rows.split", "rows.excluded", "rows.tied", "rows.swapped"), 0)
        self._lengths: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
        self.supervised = dict.fromkeys(SPLITS, 0)
        self.desirable: int | None = None
        """Of the training rows, those whose answer has a good label; None for rows without labels."""
        # rows, tokens, supervised tokens of each source's training rows
        self.trained = np.zeros((len(sources), 3), dtype=np.int64)

    def add(self, result: Result) -> None:
        """Add the result of a chunk. Raises UserError as `end_of_file` does, for the file before."""
        if result.origin != self._file.name:
            self.end_of_file()
            self._file = _File(result.origin)
        self.read += result.read
        self._file.read += result.read
        self.by_source[result.source]["read_rows"] += result.read
        excluded = sum(result.counts.get(name, 0) for name in ("rows.excluded", "rows.tied"))
        self.by_source[result.source]["excluded_rows"] += excluded
        self.by_source[result.source]["dropped_rows"] += len(result.dropped)
        self.columns[result.source].update(
            {name: number for name, number in result.counts.items() if name.startswith("column.")}
        )
        seen = self.seen[result.source]
        for what, number in result.seen.items():
            # Rows may have any number of names.
            seen[what if len(seen) < NAMES or what in seen else (*what[:2], OTHERS)] += number
        for row in result.dropped:
            self._add_dropped(row)
        for name in self.cut:
            self.cut[name] += result.counts.get(name, 0)

    def _add_dropped(self, row: Dropped) -> None:
        self.dropped[row.kind] += 1
        file = self._file
        if row.kind == "bad_row":
            file.bad += 1
            file.first = file.first or _first(row)
        if row.form:
            file.other += 1
            file.first_other = file.first_other or f"{row.place}: {row.reason}"
        key = row.kind, VALUES.sub("_", row.reason)
        if key in self._reasons or len(self._reasons) < REASONS:
            before = self._reasons.get(key, _Reason(0, row))
            self._reasons[key] = before._replace(rows=before.rows + 1)

    def end_of_file(self) -> None:
        """Raise UserError if `bad_row: drop`, meant for single rows, would drop all rows of the last file, or many that
        have another form than its source."""
        file = self._file
        if file.other > FEW * file.read:
            raise UserError(
                f"{file.first_other} (bad_row: drop would drop {file.other:,} of the {file.read:,} rows of {file.name})"
            )
        if file.bad == file.read > 1:
            raise UserError(
                f"{file.name}: none of its {file.read:,} rows can be used, the first is {file.first}; correct them, or "
                "remove the file from the folder or from sources"
            )

    def dropped_line(self) -> str:
        """Return the number of dropped rows, with the first of each reason; empty if none was dropped."""
        rows = sum(self.dropped.values())
        if not rows:
            return ""
        reasons = sorted(self._reasons.values(), key=lambda reason: -reason.rows)[:SHOWN_REASONS]
        parts = [f"{each.rows:,} as {each.first.kind}, the first {_first(each.first)}" for each in reasons]
        others = rows - sum(each.rows for each in reasons)
        return (
            f"{rows:,} of {self.read:,} rows that were read are dropped ({'; '.join(parts)}"
            f"{f'; {others:,} for other reasons' if others else ''}), all listed in {self.listed}"
        )

    def count(self, split: str, batch: Any) -> None:
        """Count rows (an Arrow record batch) that were written to a split."""
        lengths, supervised = batch["length"].to_numpy(), batch["supervised"].to_numpy()
        self._lengths[split].append(lengths)
        self.supervised[split] += int(supervised.sum())
        if split == "train":
            if "desirable" in batch.schema.names:
                self.desirable = (self.desirable or 0) + int(batch["desirable"].to_numpy().sum())
            source = batch["source"].to_numpy()
            for column, weights in enumerate((None, lengths, supervised)):
                self.trained[:, column] += np.bincount(source, weights, len(self.sources)).astype(np.int64)

    @property
    def lengths(self) -> dict[str, np.ndarray]:
        """The tokens of each row, by split."""
        return {name: np.concatenate([np.zeros(0, np.int32), *parts]) for name, parts in self._lengths.items()}

    def flat(self) -> dict[str, Any]:
        """Return the content of stats.json: numbers by name, and those of each source if there are several."""
        result: dict[str, Any] = {
            "read_rows": self.read,
            "dropped_bad_rows": self.dropped["bad_row"],
            "dropped_too_long_rows": self.dropped["too_long"],
            "truncated_rows": self.cut["rows.truncated"],
            "split_rows": self.cut["rows.split"],
            "excluded_rows": self.cut["rows.excluded"],
            "tied_rows": self.cut["rows.tied"],
            "swapped_rows": self.cut["rows.swapped"],
            **self.counts,
            "names": self._names(),
        }
        for name, lengths in self.lengths.items():
            tokens = int(lengths.sum())
            result |= {
                f"{name}_rows": len(lengths),
                f"{name}_tokens": tokens,
                f"{name}_supervised_tokens": self.supervised[name],
                f"{name}_supervised_share": round(self.supervised[name] / max(1, tokens), 6),
                f"{name}_longest_row": int(lengths.max(initial=0)),
                f"{name}_mean_row": round(float(lengths.mean()), 2) if len(lengths) else 0.0,
            }
        if self.desirable is not None:
            result["train_desirable_rows"] = self.desirable
        result["longest_row"] = max(result[f"{name}_longest_row"] for name in SPLITS)
        if len(self.sources) > 1:
            result["sources"] = {name: self._of_source(number) for number, name in enumerate(self.sources)}
        return result

    def _names(self) -> dict[str, dict[str, int]]:
        """Return the number of rows with a value in a column, and of messages with a value in a key, by use: read,
        ignored (the config's `ignore`), redundant (part of a text that is read), or constant (the same in all rows)."""
        result: dict[str, dict[str, int]] = {}
        for (status, where, name), number in sorted(sum(self.seen, Seen()).items()):
            part = result.setdefault(f"{status}_{where}s", {})
            part[printed(name)] = part.get(printed(name), 0) + number
        return result

    def has_key(self, source: int, name: str) -> bool:
        """Return whether a message of a source has a key."""
        return bool(self.seen[source].get(("read", "key", name)))

    def _of_source(self, number: int) -> dict[str, Any]:
        rows, tokens, supervised = (int(value) for value in self.trained[number])
        return {
            **self.by_source[number],
            "train_rows": rows,
            "train_tokens": tokens,
            "train_supervised_tokens": supervised,
            "train_supervised_share": round(supervised / max(1, self.supervised["train"]), 6),
        }

    def line(self) -> str:
        """Return the most important counts in one line."""
        flat = self.flat()
        rows = ", ".join(f"{flat[f'{name}_rows']:,} {name}" for name in SPLITS)
        dropped = flat["dropped_bad_rows"] + flat["dropped_too_long_rows"]
        unread = []
        for status in ("ignored", "redundant", "constant"):
            numbers = [flat["names"].get(f"{status}_{where}s", {}) for where in ("column", "key")]
            names = [name for each in numbers for name in sorted(each, key=lambda name: (-each[name], name))]
            if names:
                more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
                unread.append(f"{', '.join(names[:SHOWN_NAMES])}{more} ({status})")
        excluded = "".join(
            f"{flat[f'{name}_rows']:,} {name}, " for name in ("excluded", "tied", "swapped") if flat[f"{name}_rows"]
        )
        return (
            f"{rows} rows; {flat['train_tokens']:,} training tokens, {flat['train_supervised_share']:.1%} supervised; "
            f"{excluded}{dropped:,} rows dropped, {flat['truncated_rows'] + flat['split_rows']:,} cut, "
            f"{flat['duplicate_rows']:,} duplicates, {flat['leaked_prompts']:,} training prompts also held out, "
            f"{flat['leaked_normalized_prompts']:,} but for case, spaces and punctuation, "
            f"{flat['leaked_near_prompts']:,} nearly"
            f"{'; not read: ' if unread else ''}{', '.join(unread)}"
        )


def write_lengths(path: Path, lengths: dict[str, np.ndarray]) -> None:
    """Write a histogram of row lengths for each split, with bins of equal width; `tokens` is a bin's upper end."""
    longest = max(int(part.max(initial=0)) for part in lengths.values())
    width = -(-longest // BINS)
    edges = np.arange(0, longest + width, width)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["tokens", *lengths])
    # A bin holds lengths from edge + 1 to the next edge.
    counts = [np.histogram(part - 0.5, edges)[0] for part in lengths.values()]
    writer.writerows(zip(edges[1:].tolist(), *(column.tolist() for column in counts), strict=True))
    write_text(path, table.getvalue())


def printed(name: str) -> str:
    """Return the name of a column or key as one short line."""
    return name if name.isprintable() and len(name) <= 60 else shown(name)


def _first(row: Dropped) -> str:
    reason = row.reason if len(row.reason) <= LONGEST else row.reason[: LONGEST - 3] + "..."
    return f"{row.place}: {reason}"
