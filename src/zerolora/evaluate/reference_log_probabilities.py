"""Stage reference: the log-probabilities of the data's answers under the model that training starts from, or another.

    zerolora stage reference REFERENCED

Writes train.arrow and validation.arrow, row for row with the data: the sum over each answer's tokens, fp64. It computes
them once for all runs on the same rows, weights, adapter, precision and quantization, without dropout. "The model with
its adapter off" would be another model where factors start with a part of the base weights, as PiSSA's do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerolora.config.compared import compared
from zerolora.config.settings import ReferenceSettings
from zerolora.data.prepared_rows import kind_of, open_split
from zerolora.data.reference_columns import SPLITS
from zerolora.errors import UserError
from zerolora.evaluate import frozen_model
from zerolora.files import MANIFEST, describe, sha256, staged_directory, write_json
from zerolora.log import result
from zerolora.machine import cpu_matmul, devices
from zerolora.model import added_tokens
from zerolora.model.manifest import located
from zerolora.progress import Progress
from zerolora.train.beginning import model_identity
from zerolora.train.feed import collate
from zerolora.train.loss import logits_of, token_losses
from zerolora.train.objectives.mismatched import mismatched, partners
from zerolora.train.objectives.objective import Sequence, by_sequence, token_counts
from zerolora.units import counted


def compute(settings: ReferenceSettings, data: Path, weights: Path, output: Path) -> None:
    """Write the log-probabilities of the training and validation rows of `data`, under the base model that the file
    `weights` locates, with the settings' adapter. Raises UserError for rows without answers to compare, an adapter of
    another model, or log-probabilities that are not finite."""
    device = torch.device(devices.GPU, 0) if settings.device == "cuda" else torch.device("cpu")
    if settings.device == "cpu":
        cpu_matmul.choose()
    sequences = {split: _sequences(open_split(data, split)) for split in SPLITS}  # before a model is loaded
    adapter = Path(settings.from_adapter) if settings.from_adapter else None
    model, prefixes = frozen_model.load(
        located(weights), added_tokens.of_data(data), device, settings.precision, settings.quantization, adapter
    )
    with staged_directory(output) as staged:
        counts = {
            split: _write(model, sequences[split], staged / f"{split}.arrow", split, prefixes) for split in SPLITS
        }
        origin = {
            "data_manifest_sha256": sha256(data / MANIFEST),
            "settings": compared(settings),
            "model": model_identity(weights, adapter),
        }
        write_json(staged / MANIFEST, {**origin, "files": describe(staged)})
    result(counted(sum(counts.values()), "answer"))


def _write(model: Any, sequences: "_Sequences", file: Path, split: str, prefixes: bool) -> int:
    """Write the columns of a split to `file`; return the number of its sequences."""
    import pyarrow

    names = sequences.names
    values = np.zeros(len(sequences))
    with Progress(f"answer of {split}", len(sequences)) as bar, torch.no_grad():
        for batch in _batches(sequences):
            values[batch] = log_probabilities(model, [sequences[number] for number in batch], prefixes)
            bar.update(len(batch))
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0]) // len(names)
        raise UserError(
            f"the log-probability of an answer in row {row + 1:,} of {split} is not finite; check the model"
        )
    columns = {name: values[number :: len(names)] for number, name in enumerate(names)}
    table = pyarrow.table({name: pyarrow.array(column, pyarrow.float64()) for name, column in columns.items()})
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return len(values)


class _Sequences:
    """The sequences of a split, by number: those of a row are consecutive."""

    names: tuple[str, ...]
    """The columns of their values, in a row."""

    def __init__(self, rows: Any, lengths: tuple[np.ndarray, ...]) -> None:
        """lengths: the tokens of each row's sequences, [rows] each."""
        self.rows = rows
        self.padded = len(lengths) * np.max(lengths, axis=0)
        """The tokens of each row's sequences, all padded to the longest of them: [rows]."""

    def __len__(self) -> int:
        return len(self.names) * len(self.rows)

    def __getitem__(self, number: int) -> Sequence:
        row, which = divmod(number, len(self.names))
        return {**self.tokens(row, which), "source": 0}

    def tokens(self, row: int, which: int) -> Sequence:
        """Return input_ids and labels of a row's sequence."""
        raise NotImplementedError


class _OfPairs(_Sequences):
    names = ("reference_chosen", "reference_rejected")

    def __init__(self, rows: Any) -> None:
        super().__init__(rows, (token_counts(rows, "input_ids"), token_counts(rows, "rejected_input_ids")))

    def tokens(self, row: int, which: int) -> Sequence:
        prefix, values = ("", "rejected_")[which], self.rows[row]
        return {name: values[f"{prefix}{name}"] for name in ("input_ids", "labels")}


class _Labelled(_Sequences):
    names = ("reference", "reference_mismatched")

    def __init__(self, rows: Any) -> None:
        columns = rows.with_format("numpy")
        self.partners = partners(np.asarray(columns["prompt_hash"][:]))
        length, prompt = (np.asarray(columns[name][:], np.int64) for name in ("length", "prompt"))
        self.longest = int(length.max(initial=0))
        crossed = prompt + (length - prompt)[self.partners]
        super().__init__(rows, (length, np.minimum(crossed, self.longest)))

    def tokens(self, row: int, which: int) -> Sequence:
        values = self.rows[row]
        if which:
            return mismatched(values, self.rows[int(self.partners[row])], self.longest)
        return {name: values[name] for name in ("input_ids", "labels")}


def _sequences(rows: Any) -> _Sequences:
    """Return the sequences of a split. Raises UserError for rows without answers to compare."""
    match kind_of(rows):
        case "pairs":
            return _OfPairs(rows)
        case "labelled":
            return _Labelled(rows)
    raise UserError("the prepared rows have no answers to compare; run `zerolora stage prepare` again")


def _batches(sequences: _Sequences) -> Iterator[list[int]]:
    """Yield sequence numbers in batches: of all sequences of rows with similar length."""
    each = np.arange(len(sequences.names))
    for rows in frozen_model.batches(sequences.padded):
        yield (rows[:, None] * len(each) + each).ravel().tolist()


def log_probabilities(model: Any, sequences: list[Sequence], prefixes: bool = False) -> np.ndarray:
    """Return the sum of the log-probabilities of each sequence's supervised tokens: [sequences], fp64. With `prefixes`,
    what sequences begin with in common is computed once."""
    batch = collate([[each] for each in sequences], False, model.device, prefixes)
    if frozen_model.is_chunked(model):
        losses = token_losses(model, batch)
    else:
        logits = logits_of(model, batch).flatten(0, 1).index_select(0, batch["supervised"])
        losses = torch.nn.functional.cross_entropy(logits.float(), batch["targets"], reduction="none")
    return np.array((-by_sequence(losses, batch)).tolist())
