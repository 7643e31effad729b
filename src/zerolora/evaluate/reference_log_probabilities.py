"""Stage reference: the log-probabilities of the data's answers under the model that training starts from.

    zerolora log-probabilities --settings JSON --data results/data/NAME --weights resources/weights/MODEL.json
                               --output results/RUN/reference

Writes train.arrow and validation.arrow, row for row with the data: the sum over each answer's tokens, fp64. It computes
them once for all runs on the same rows, weights, adapter, precision and quantization, without dropout. "The model with
its adapter off" would be another model where factors start with a part of the base weights, as PiSSA's do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerolora.compat.bitsandbytes_patches import keep_layout
from zerolora.compat.transformers_patches import resizable
from zerolora.config.compared import compared
from zerolora.config.settings import ReferenceSettings
from zerolora.data.prepared_rows import open_split
from zerolora.data.reference_columns import SPLITS
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import placement, with_adapter
from zerolora.files import MANIFEST, describe, sha256, staged_directory, write_json
from zerolora.log import result
from zerolora.machine import cpu_matmul, devices
from zerolora.methods.registry import check_published
from zerolora.model import added_tokens
from zerolora.model.manifest import located
from zerolora.model.spec import EVALUATION_TOKENS
from zerolora.progress import Progress
from zerolora.train import base_model
from zerolora.train.engines.engine import DTYPES
from zerolora.train.feed import collate
from zerolora.train.loss import logits_of
from zerolora.train.objectives.mismatched import mismatched, partners
from zerolora.train.objectives.objective import Sequence, by_sequence
from zerolora.units import counted


def compute(settings: ReferenceSettings, data: Path, weights: Path, output: Path) -> None:
    """Write the log-probabilities of the training and validation rows of `data`, under the base model that the file
    `weights` locates, with the settings' adapter. Raises UserError for rows without answers to compare, an adapter of
    another model, or log-probabilities that are not finite."""
    device = torch.device(devices.GPU, 0) if settings.device == "cuda" else torch.device("cpu")
    if settings.device == "cpu":
        cpu_matmul.choose()
    model = load(settings, located(weights), data, device)
    with staged_directory(output) as staged:
        rows = {split: open_split(data, split) for split in SPLITS}
        counts = {split: _write(model, rows[split], staged / f"{split}.arrow", split) for split in SPLITS}
        origin = {"data_manifest_sha256": sha256(data / MANIFEST), "settings": compared(settings)}
        write_json(staged / MANIFEST, {**origin, "files": describe(staged)})
    result(counted(sum(counts.values()), "answer"))


def load(settings: ReferenceSettings, weights: Path, data: Path, device: torch.device) -> Any:
    """Return the model that training starts from, in evaluation mode: on `device`, or spread over all GPUs of this
    process if it does not fit on one."""
    tokens = added_tokens.of_data(data)
    quantization = None
    if settings.quantization:
        quantization = base_model.bitsandbytes_config(settings.quantization, settings.precision, sharded=False)
    attention = "sdpa" if base_model.builds(weights, "sdpa") else "eager"
    spread = bool(placement(weights, device))
    dtype = DTYPES[settings.precision]
    model = base_model.read(weights, dtype, attention, device, quantization, spread=spread)
    if quantization:
        keep_layout(model)
    with resizable(model):
        added_tokens.add_rows(model, tokens)
    model.config.use_cache = False
    if settings.from_adapter:
        adapter = Path(settings.from_adapter)
        check_published(adapter, weights)
        model = with_adapter(model, adapter)
    return model.eval()


def _write(model: Any, rows: Any, file: Path, split: str) -> int:
    """Write the columns of a split to `file`; return the number of its sequences."""
    import pyarrow

    sequences = _sequences(rows)
    names = sequences.names
    values = np.zeros(len(sequences))
    with Progress(f"answer of {split}", len(sequences)) as bar, torch.no_grad():
        for batch in _batches(sequences.lengths):
            values[batch] = log_probabilities(model, [sequences[number] for number in batch])
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

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.length = np.asarray(rows.with_format("numpy")["length"][:], np.int64)

    def __len__(self) -> int:
        return len(self.names) * len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sequence, or more: [sequences]."""
        return np.repeat(self.length, len(self.names))

    def __getitem__(self, number: int) -> Sequence:
        row, which = divmod(number, len(self.names))
        return {**self.tokens(row, which), "source": 0}

    def tokens(self, row: int, which: int) -> Sequence:
        """Return input_ids and labels of a row's sequence."""
        raise NotImplementedError


class _OfPairs(_Sequences):
    names = ("reference_chosen", "reference_rejected")

    def tokens(self, row: int, which: int) -> Sequence:
        prefix, values = ("", "rejected_")[which], self.rows[row]
        return {name: values[f"{prefix}{name}"] for name in ("input_ids", "labels")}


class _Labelled(_Sequences):
    names = ("reference", "reference_mismatched")

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.partners = partners(np.asarray(rows.with_format("numpy")["prompt_hash"][:]))

    def tokens(self, row: int, which: int) -> Sequence:
        values = self.rows[row]
        if which:
            return mismatched(values, self.rows[int(self.partners[row])], int(self.length.max()))
        return {name: values[name] for name in ("input_ids", "labels")}


def _sequences(rows: Any) -> _Sequences:
    """Return the sequences of a split. Raises UserError for rows without answers to compare."""
    if "rejected_input_ids" in rows.column_names:
        return _OfPairs(rows)
    if "desirable" in rows.column_names:
        return _Labelled(rows)
    raise UserError("the prepared rows have no answers to compare; run `zerolora prepare` again")


def _batches(lengths: np.ndarray) -> Iterator[list[int]]:
    """Yield the numbers of sequences of similar length, the longest first: up to EVALUATION_TOKENS tokens with padding,
    but at least one sequence."""
    order = np.argsort(-lengths, kind="stable").tolist()
    while order:
        size = max(1, EVALUATION_TOKENS // max(1, int(lengths[order[0]])))
        yield order[:size]
        del order[:size]


def log_probabilities(model: Any, sequences: list[Sequence]) -> np.ndarray:
    """Return the sum of the log-probabilities of each sequence's supervised tokens: [sequences], fp64."""
    batch = collate([[each] for each in sequences], False, model.device)
    logits = logits_of(model, batch).flatten(0, 1).index_select(0, batch["supervised"])
    losses = torch.nn.functional.cross_entropy(logits.float(), batch["targets"], reduction="none")
    return np.asarray(-by_sequence(losses, batch).cpu().numpy())
