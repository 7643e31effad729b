"""Statistics of a data set: rows, lengths and sources, and rows that were dropped or truncated."""

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from zerolora.data.formats.reading import Seen
from zerolora.data.prepared_rows import SPLITS
from zerolora.errors import shown
from zerolora.files import write_text

BINS = 40
NAMES = 1000  # names of columns and keys that are counted one by one
OTHERS = "others"
SHOWN = 8  # names in a line


class Statistics:
    """Counts that are accumulated chunk by chunk. `lengths`: tokens of each row, by split. `columns`: number of rows of
    each source that have a column mapped in the config."""

    def __init__(self, sources: list[str]) -> None:
        self.sources = sources
        self.counts: dict[str, int] = {}
        self.by_source = [dict.fromkeys(("read_rows", "dropped_rows"), 0) for _ in sources]
        self.columns: list[Counter[str]] = [Counter() for _ in sources]
        self.seen: list[Seen] = [Seen() for _ in sources]
        self.read = 0
        self.dropped = {"bad_row": 0, "too_long": 0}
        self.cut = {"rows.truncated": 0, "rows.split": 0}
        self._lengths: dict[str, list[np.ndarray]] = {name: [] for name in SPLITS}
        self.supervised = dict.fromkeys(SPLITS, 0)
        # rows, tokens, supervised tokens of each source's training rows
        self.trained = np.zeros((len(sources), 3), dtype=np.int64)

    def add(self, result: Any) -> None:
        """Add the result of a chunk (a tokenize.Result)."""
        self.read += result.read
        self.by_source[result.source]["read_rows"] += result.read
        self.by_source[result.source]["dropped_rows"] += len(result.dropped)
        self.columns[result.source].update(
            {name: number for name, number in result.counts.items() if name.startswith("column.")}
        )
        seen = self.seen[result.source]
        for what, number in result.seen.items():
            # Rows may have any number of names.
            seen[what if len(seen) < NAMES or what in seen else (*what[:2], OTHERS)] += number
        for row in result.dropped:
            self.dropped[row.kind] += 1
        for name in self.cut:
            self.cut[name] += result.counts.get(name, 0)

    def count(self, split: str, batch: Any) -> None:
        """Count rows (an Arrow record batch) that were written to a split."""
        lengths, supervised = batch["length"].to_numpy(), batch["supervised"].to_numpy()
        self._lengths[split].append(lengths)
        self.supervised[split] += int(supervised.sum())
        if split == "train":
            source = batch["source"].to_numpy()
            for column, weights in enumerate((None, lengths, supervised)):
                self.trained[:, column] += np.bincount(source, weights, len(self.sources)).astype(np.int64)

    @property
    def lengths(self) -> dict[str, np.ndarray]:
        """Return the tokens of each row, by split."""
        return {name: np.concatenate([np.zeros(0, np.int32), *parts]) for name, parts in self._lengths.items()}

    def flat(self) -> dict[str, Any]:
        """Return the content of stats.json: numbers by name, and those of each source if there are several."""
        result: dict[str, Any] = {
            "read_rows": self.read,
            "dropped_bad_rows": self.dropped["bad_row"],
            "dropped_too_long_rows": self.dropped["too_long"],
            "truncated_rows": self.cut["rows.truncated"],
            "split_rows": self.cut["rows.split"],
            **self.counts,
            "names": self.names(),
        }
        for name, lengths in self.lengths.items():
            tokens = int(lengths.sum())
            result |= {
                f"{name}_rows": len(lengths),
                f"{name}_tokens": tokens,
                f"{name}_supervised_tokens": self.supervised[name],
                f"{name}_supervised_share": round(self.supervised[name] / tokens, 6),
                f"{name}_longest_row": int(lengths.max()),
                f"{name}_mean_row": round(float(lengths.mean()), 2),
            }
        result["longest_row"] = max(result[f"{name}_longest_row"] for name in SPLITS)
        if len(self.sources) > 1:
            result["sources"] = {name: self._of_source(number) for number, name in enumerate(self.sources)}
        return result

    def names(self) -> dict[str, dict[str, int]]:
        """Return in how many rows a column, and in how many messages a key, holds something: those that were read, were
        left out by the config's `ignore`, and were not read."""
        result: dict[str, dict[str, int]] = {}
        for (status, where, name), number in sorted(sum(self.seen, Seen()).items()):
            part = result.setdefault(f"{status}_{where}s", {})
            part[printed(name)] = part.get(printed(name), 0) + number
        return result

    def has_key(self, source: int, name: str) -> bool:
        """Return whether a message of a source has a key."""
        return any(self.seen[source].get((status, "key", name)) for status in ("read", "ignored", "unread"))

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
        return (
            f"{rows} rows; {flat['train_tokens']:,} training tokens, {flat['train_supervised_share']:.1%} supervised; "
            f"{dropped:,} rows dropped, {flat['truncated_rows'] + flat['split_rows']:,} cut, "
            f"{flat['duplicate_rows']:,} duplicates, {flat['leaked_prompts']:,} training prompts held out as well"
            f"{self._not_read()}"
        )

    def _not_read(self) -> str:
        parts = []
        for name, what in (("unread_columns", "columns"), ("unread_keys", "keys of messages")):
            if found := self.names().get(name):
                most = sorted(found, key=lambda each: (-found[each], each))
                parts.append(
                    f"{what} {', '.join(most[:SHOWN])}{f' and {len(most) - SHOWN} more' * (len(most) > SHOWN)}"
                )
        return f"; not read: {' and '.join(parts)}" if parts else ""


def write_lengths(path: Path, lengths: dict[str, np.ndarray]) -> None:
    """Write a histogram of row lengths for each split, with bins of equal width; `tokens` is a bin's upper end."""
    longest = max(int(part.max()) for part in lengths.values())
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
