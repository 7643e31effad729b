"""Stage teacher: the most likely tokens of a teacher at each supervised token of the data, for distillation.

    zerolora stage teacher TAUGHT

Writes train.arrow and validation.arrow, row for row with the data: of each supervised token the k most likely tokens,
their log-probabilities in fp16 and the logarithm of the rest's probability, at the temperature, and the label's
log-probability. stats.json has the teacher's loss on the labels.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerolora.config.compared import compared
from zerolora.config.settings import TeacherSettings
from zerolora.data.prepared_rows import kind_of, open_split
from zerolora.data.reference_columns import SPLITS
from zerolora.data.row_columns import RowColumns
from zerolora.errors import UserError, shown
from zerolora.evaluate import frozen_model
from zerolora.files import MANIFEST, describe, sha256, staged_directory, write_json
from zerolora.log import LOGGER, result
from zerolora.machine import cpu_matmul, devices
from zerolora.methods.registry import OWN_FILES
from zerolora.model import added_tokens
from zerolora.model.added_tokens import AddedToken
from zerolora.model.architecture import tokenizer_of
from zerolora.model.longest_row import longest_row
from zerolora.model.manifest import check_adapter_files, check_same_base, located
from zerolora.model.read_spec import read_model_spec
from zerolora.model.spec import LEAST_CHUNK
from zerolora.progress import Progress
from zerolora.train.feed import collate
from zerolora.train.loss import logits_of, of_logits, token_losses
from zerolora.train.objectives.distill import IDS, LABEL, LOG_PROBABILITIES, REST, WINDOW
from zerolora.train.objectives.objective import Sequence, token_counts
from zerolora.train.teacher_columns import labels_of, unigram_loss
from zerolora.train.top_k import LEAST_LOG, TopK
from zerolora.units import counted, gib

KINDS: dict[str, Any] = {IDS: np.int32, LOG_PROBABILITIES: np.float16, REST: np.float32, LABEL: np.float32}
"""The type of each column's values."""
Values = dict[str, np.ndarray]
"""The stored columns of some tokens, one token's values after another's."""


def compute(settings: TeacherSettings, data: Path, student: Path, weights: Path, output: Path) -> None:
    """Write the teacher's values of the training and validation rows of `data`. The file `weights` locates the teacher,
    `student` is the directory of the model that the rows were prepared for.

    Raises UserError for a teacher with another vocabulary, rows without labels, an adapter of another model, or values
    that are not finite.
    """
    device = torch.device(devices.GPU, 0) if settings.device == "cuda" else torch.device("cpu")
    if settings.device == "cpu":
        cpu_matmul.choose()
    splits = {split: open_split(data, split) for split in SPLITS}
    if any(kind_of(rows) != "texts" for rows in splits.values()):
        raise UserError(f"{data}: has answers to compare, which teach nothing; run `zerolora stage prepare` again")
    adapter, base = Path(settings.adapter) if settings.adapter else None, located(weights)
    tokens: list[AddedToken] = []
    if adapter:
        check_adapter_files(adapter, OWN_FILES)
        check_same_base(adapter, weights)
        tokens = added_tokens.of_directory(adapter)
    vocabulary = _common_vocabulary(settings.model, vocabulary_of(base, tokens), data, student)
    rows_of_head = read_model_spec(base).vocabulary + len(tokens)
    _check_rows(settings.model, base, splits.values(), rows_of_head)
    vocabulary = min(vocabulary, rows_of_head)
    model, prefixes = frozen_model.load(base, tokens, device, settings.precision, adapter=adapter)
    values = TopK(min(settings.top_k, vocabulary), settings.temperature, vocabulary)
    stats: dict[str, Any] = {}
    with staged_directory(output) as staged:
        for split, rows in splits.items():
            stats |= _write(_Teacher(model, prefixes, values), rows, staged / f"{split}.arrow", split)
        stats["unigram_loss"] = unigram_loss(_labels(splits["train"]), vocabulary)
        write_json(staged / "stats.json", stats)
        origin = {"data_manifest_sha256": sha256(data / MANIFEST), "settings": compared(settings)}
        write_json(staged / MANIFEST, {**origin, "k": values.k, "vocabulary": vocabulary, "files": describe(staged)})
        size = sum((staged / f"{split}.arrow").stat().st_size for split in SPLITS)
    _report(settings, stats, size)


def _report(settings: TeacherSettings, stats: dict[str, Any], size: int) -> None:
    """Print the teacher's loss, and warn of a teacher that is poor on the texts."""
    loss, bound = stats["train_loss"], stats["unigram_loss"]
    if not loss < bound:
        LOGGER.warning(
            f"{settings.model} is no teacher of these texts: its loss on the labels is {loss:.3g}, and to know only "
            f"how often each of them occurs gives {bound:.3g}"
        )
    held_out = stats.get("validation_loss")
    total = stats["train_supervised_tokens"] + stats["validation_supervised_tokens"]
    result(
        f"{counted(total, 'token')}, {gib(size)}; loss of {settings.model} on the labels {loss:.3g}"
        + (f", in validation {held_out:.3g}" if held_out is not None else "")
    )


def vocabulary_of(directory: Path, tokens: list[AddedToken]) -> dict[str, int]:
    """Return the numbers of all tokens of a model directory, and of the tokens that were added to it."""
    return {**tokenizer_of(directory).get_vocab(), **{each.token: each.id for each in tokens}}


def _common_vocabulary(teacher: str, theirs: dict[str, int], data: Path, student: Path) -> int:
    """Return one more than the largest number of a token. Raises UserError unless the teacher's tokens are those of the
    data, number by number."""
    ours = vocabulary_of(student, added_tokens.of_data(data))
    if differ := {token for token, _ in ours.items() ^ theirs.items()}:
        first = min(differ, key=lambda token: (ours.get(token, theirs.get(token, 0)), token))
        numbers = [str(each.get(first, "missing")) for each in (ours, theirs)]
        raise UserError(
            f"the teacher {teacher} has another vocabulary than the prepared rows: {counted(len(differ), 'token')}, "
            f"as {shown(first)}, which is {numbers[0]} there and {numbers[1]} in the teacher's; use a teacher with the "
            "same tokenizer, or train on answers that you sample from this one (samples)"
        )
    return max(ours.values()) + 1


def _check_rows(teacher: str, weights: Path, splits: Iterable[Any], head: int) -> None:
    """Raise UserError unless the teacher takes rows of these lengths, and has a row of its `head` for each token."""
    import pyarrow.compute

    most = longest_row(weights)
    for rows in splits:
        longest = int(token_counts(rows, "input_ids").max(initial=0))
        if most is not None and longest > most:
            raise UserError(
                f"the teacher {teacher} takes rows of {most:,} tokens, and a prepared one has {longest:,}; set "
                f"max_length in prepare to {most} or less, or use another teacher"
            )
        largest = pyarrow.compute.max(pyarrow.compute.list_flatten(rows.data.column("input_ids"))).as_py() or 0
        if largest >= head:
            raise UserError(
                f"the teacher {teacher} has {head:,} tokens in its head, and a prepared row has number {largest:,}; "
                "use a teacher with a row for each token"
            )


def _labels(rows: Any) -> np.ndarray:
    """Return the labels of all supervised tokens."""
    each = RowColumns(rows).rows(range(len(rows)), ("labels",))
    return np.concatenate([np.zeros(0, np.int32), *map(labels_of, each)])


class _Rows:
    """The rows of a split, in windows."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.columns = rows, RowColumns(rows)
        self.lengths = token_counts(rows, "input_ids")
        self.supervised = np.asarray(rows.with_format("numpy")["supervised"][:], np.int64)

    def windows(self) -> Iterator[np.ndarray]:
        """Yield numbers of rows, in order, of about WINDOW supervised tokens."""
        window = np.cumsum(self.supervised) // WINDOW
        yield from np.split(np.arange(len(window)), np.flatnonzero(np.diff(window)) + 1) if len(window) else ()

    def sequences(self, numbers: np.ndarray) -> list[Sequence]:
        """Return the sequences of some rows."""
        return list(self.columns.rows(numbers.tolist(), ("input_ids", "labels", "source")))


class _Teacher:
    """A teacher, and what is stored of its distributions."""

    def __init__(self, model: Any, prefixes: bool, values: TopK) -> None:
        self.model, self.prefixes, self.values = model, prefixes, values

    def values_of(self, name: str) -> int:
        """Return the values of a token in a column."""
        return self.values.k if name in (IDS, LOG_PROBABILITIES) else 1

    def of(self, sequences: list[Sequence]) -> Values:
        """Return the values of all supervised tokens of some sequences."""
        batch = collate([[each] for each in sequences], False, self.model.device, self.prefixes)
        if frozen_model.is_chunked(self.model):
            values = token_losses(self.model, batch, self.values)
        else:
            logits = logits_of(self.model, batch).flatten(0, 1).index_select(0, batch["supervised"])
            size, targets = LEAST_CHUNK, batch["targets"].to(logits.device)
            parts = zip(logits.split(size), targets.split(size), strict=True)
            values = torch.cat([of_logits(part.float(), target, self.values) for part, target in parts], 1)
        k, kept = self.values.k, values.cpu()
        return {
            IDS: kept[:k].T.to(torch.int32).numpy().ravel(),
            LOG_PROBABILITIES: kept[k : 2 * k].T.clamp_min(LEAST_LOG).half().numpy().ravel(),
            REST: kept[-2].numpy(),
            LABEL: kept[-1].numpy(),
        }


def _write(teacher: _Teacher, rows: Any, file: Path, split: str) -> dict[str, Any]:
    """Write the columns of a split to `file`; return its number of tokens and the teacher's loss on their labels."""
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.list_(pyarrow.from_numpy_dtype(kind))) for name, kind in KINDS.items()])
    read, total = _Rows(rows), 0.0
    with (
        pyarrow.OSFile(str(file), "wb") as sink,
        pyarrow.ipc.new_stream(sink, schema) as writer,
        Progress(f"row of {split}", len(rows)) as bar,
        torch.no_grad(),
    ):
        for window in read.windows():
            values = _of_window(teacher, read, window, bar)
            label = values[LABEL]
            if not (np.isfinite(label).all() and np.isfinite(values[LOG_PROBABILITIES]).all()):
                raise UserError(
                    f"a teacher's probability of a row of {split} is not finite; check the model and the temperature"
                )
            total -= float(label.sum(dtype=np.float64))
            counts = read.supervised[window]
            columns = [
                pyarrow.ListArray.from_arrays(
                    pyarrow.array(np.cumsum([0, *(counts * teacher.values_of(name))]), pyarrow.int32()),
                    pyarrow.array(values[name]),
                )
                for name in schema.names
            ]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
    count = int(read.supervised.sum())
    return {f"{split}_supervised_tokens": count} | ({f"{split}_loss": total / count} if count else {})


def _of_window(teacher: _Teacher, read: _Rows, window: np.ndarray, bar: Progress) -> Values:
    """Return the values of the supervised tokens of some rows, in their order."""
    starts = np.cumsum([0, *read.supervised[window]])
    result: Values = {name: np.empty(int(starts[-1]) * teacher.values_of(name), kind) for name, kind in KINDS.items()}
    for batch in frozen_model.batches(read.lengths[window]):
        values = teacher.of(read.sequences(window[batch]))
        ends = np.cumsum(read.supervised[window[batch]])
        for number, end in zip(batch.tolist(), ends.tolist(), strict=True):
            start, first = end - int(read.supervised[window[number]]), int(starts[number])
            for name, into in result.items():
                width = teacher.values_of(name)
                into[first * width : (first + end - start) * width] = values[name][start * width : end * width]
        bar.update(len(batch))
    return result
