"""The prompts of a data set to sample from: the split `prompts`.

It has the distinct prompts of the training rows, in their order, each with the columns of a held-out row, with the
conversation before the answer, and with the answers that all rows give to it. A prompt that is equal to a held-out one,
or near one (near_prompts.py), is never in it, whatever `leakage` does with the training row. Without a sample of the
data set it is empty.
"""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from zerolora.config.settings import PrepareSettings
from zerolora.data.mixture import Mixture
from zerolora.data.prepared_rows import PROMPTS, ROW, open_table, schema
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.units import counted

LONGEST = b"longest"
"""Key of the file's metadata: the tokens of the longest prompt."""
GIVEN = "given"
"""Column of the distinct answers that the rows with this prompt give to it, without undesirable ones."""


class SampledPrompts:
    """Writes the split. Use as a context manager."""

    def __init__(self, path: Path, settings: PrepareSettings, mixture: Mixture) -> None:
        """Without settings.prompts, the split stays empty; with it, leaving the context raises UserError if it is."""
        import pyarrow

        self.path, self.settings, self.written = path, settings, 0
        trained = mixture.times > 0
        self.taken = trained.copy()
        self.taken[mixture.leaked] = False
        self.leaked = int(trained.sum() - self.taken.sum())
        self.without = 0
        self.longest = 0
        self.seen: dict[bytes, None] = {}
        self.given: dict[bytes, dict[str, None]] = {}
        self.batches: list[Any] = []
        self.schema = schema(held_out=True, rows=settings.rows, prompts=True)
        self.empty = pyarrow.Table.from_batches([], self.schema)

    def __enter__(self) -> "SampledPrompts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            return
        self._write()
        if self.settings.prompts and not self.written:
            raise UserError(
                f"{self.settings.path}: {self.line()}, but samples asks its prompts; add rows with a conversation, or "
                "name another data set in samples"
            )
        if self.settings.prompts:
            LOGGER.info(f"{self.settings.path}: {self.line()}")

    def add(self, batch: Any, start: int) -> None:
        """Add the prompts of the rows from number `start` on."""
        if not self.settings.prompts:
            return
        import pyarrow

        columns = [batch[name].to_pylist() for name in ("prompt", ROW, "expected")]
        right = batch["desirable"].to_pylist() if "desirable" in batch.schema.names else [1] * len(batch)
        taken = self.taken[start : start + len(batch)].tolist()
        kept = []
        rows = zip(*columns, right, taken, strict=True)
        for number, (length, conversation, expected, desirable, is_taken) in enumerate(rows):
            if not length or not conversation:
                self.without += is_taken
                continue
            key = prompt_key(batch["input_ids"][number].values.to_numpy()[:length])
            if desirable:
                self.given.setdefault(key, {})[expected] = None
            if is_taken and key not in self.seen:
                self.seen[key] = None
                self.longest = max(self.longest, length)
                kept.append(number)
        if kept:
            self.batches.append(batch.take(pyarrow.array(kept)))
        self.written += len(kept)

    def line(self) -> str:
        """Return the counts in a line."""
        parts = [f"{counted(self.written, 'prompt')} to sample from"]
        if self.leaked:
            parts.append(f"{counted(self.leaked, 'training row')} left out, equal or near a held-out prompt")
        if self.without:
            parts.append(f"{counted(self.without, 'training row')} left out, without a whole prompt of messages")
        return "; ".join(parts)

    def _write(self) -> None:
        import pyarrow

        table = pyarrow.Table.from_batches(self.batches, self.schema) if self.batches else self.empty
        given = pyarrow.array([[*self.given.get(key, ())] for key in self.seen], pyarrow.list_(pyarrow.string()))
        table = table.append_column(GIVEN, given).replace_schema_metadata({LONGEST: str(self.longest)})
        with pyarrow.OSFile(str(self.path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)


def prompt_key(tokens: np.ndarray) -> bytes:
    """Return what tells a prompt from all others: a hash of its tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()


def size_of(data: Path) -> tuple[int, int]:
    """Return the number of prompts to sample from, and the tokens of the longest. Raises UserError without the file."""
    table = open_table(data, PROMPTS)
    return table.num_rows, int((table.schema.metadata or {}).get(LONGEST, b"0"))
