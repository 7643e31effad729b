"""Prepared rows, read back memory-mapped."""

from pathlib import Path
from typing import Any

from zerolora.errors import UserError

FIELDS = ("instruction", "input", "output")
IGNORED = -100  # the label that cross-entropy skips


def open_split(data: Path, split: str) -> Any:
    """Return a split of a prepared data set (its directory) as a memory-mapped `datasets.Dataset`.

    Raises UserError if it is not there or not whole.
    """
    import pyarrow
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = data / f"{split}.arrow"
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; `zerolora prepare` writes it")
    try:
        return Dataset.from_file(str(path))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: is not a whole Arrow file ({reason}); run `zerolora prepare` again") from None
