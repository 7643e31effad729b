"""Prepared rows, read back memory-mapped."""

from pathlib import Path
from typing import Any

from zerolora.errors import UserError

FIELDS = ("instruction", "input", "output")
IGNORED = -100  # the label that cross-entropy skips


def open_split(data: Path, split: str) -> Any:
    """Return a split of a prepared data set (its directory) as a memory-mapped `datasets.Dataset`.

    Raises UserError if it is not there.
    """
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = data / f"{split}.arrow"
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `zerolora prepare` writes it")
    return Dataset.from_file(str(path))
