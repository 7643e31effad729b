"""Prepared rows: their Arrow schema, and memory-mapped access."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.types import RowKind

FIELDS = ("question", "expected")  # of held-out rows: the last user message, and the answer in the data
IGNORED = -100  # the label that cross-entropy skips
SPLITS = ("train", "validation", "test")
HASHES = "hashes"
"""Column of held-out rows: the hashes of the row, of its prompt and of the normal form of that without its system
prompt, by which rows of other data sets are compared with it."""
PROMPTS = "prompts"
"""The split of the prompts to sample from: distinct ones of the training rows. No manifest lists its file, so that a
sample of a data set changes nothing else of it."""
ROW = "row"
"""Column of that split: the conversation before the answer, as the JSON of a row."""


def schema(held_out: bool, rows: RowKind = "texts", prompts: bool = False) -> Any:
    """Return the Arrow schema of a split: input_ids and labels (token numbers), length and supervised (tokens),
    source (its number in the manifest); of held-out rows also prompt (tokens before the answer), HASHES and FIELDS
    (texts).

    A row of pairs has these of the prompt with the chosen answer, and rejected_input_ids and rejected_labels of the
    prompt with the rejected one; length and supervised are of both, chosen_supervised of the chosen answer; held-out
    rows have the text `rejected`. A labelled row always has prompt, also prompt_hash (equal for equal prompts) and
    desirable (1, or 0). With `prompts`, held-out rows also have ROW.
    """
    import pyarrow

    tokens, number = pyarrow.list_(pyarrow.int32()), pyarrow.int32()
    columns = [("input_ids", tokens), ("labels", tokens), ("length", number), ("supervised", number)]
    columns.append(("source", pyarrow.int16()))
    if rows == "pairs":
        columns += [("rejected_input_ids", tokens), ("rejected_labels", tokens), ("chosen_supervised", number)]
    if rows == "labelled":
        columns += [("prompt_hash", pyarrow.int64()), ("desirable", pyarrow.int8())]
    if held_out or rows == "labelled":
        columns.append(("prompt", number))
    if held_out:
        columns.append((HASHES, pyarrow.list_(pyarrow.uint64(), 3)))
        columns += [(field, pyarrow.string()) for field in (*FIELDS, *(("rejected",) if rows == "pairs" else ()))]
    if prompts:
        columns.append((ROW, pyarrow.string()))
    return pyarrow.schema(columns)


def kind_of(rows: Any) -> RowKind:
    """Return what the rows of a prepared split hold, by their columns."""
    columns = {*rows.column_names}
    return "pairs" if "rejected_input_ids" in columns else "labelled" if "desirable" in columns else "texts"


def open_table(data: Path, split: str) -> Any:
    """Return a split of the prepared data in `data` as a memory-mapped pyarrow.Table. Raises UserError if it is missing
    or incomplete."""
    import pyarrow

    path = data / f"{split}.arrow"
    with _explained(path):
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()


def open_split(data: Path, split: str) -> Any:
    """Return a split of the prepared data in `data` as a memory-mapped `datasets.Dataset`, whose import takes more than
    a second. Raises UserError if it is missing or incomplete."""
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = data / f"{split}.arrow"
    with _explained(path):
        return Dataset.from_file(str(path))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise UserError if an Arrow file is missing or incomplete."""
    import pyarrow

    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `zerolora stage prepare` writes it")
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: is not a whole Arrow file ({reason}); run `zerolora stage prepare` again") from None
