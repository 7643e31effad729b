"""The log-probabilities of a data set's answers under a reference, as further columns."""

from pathlib import Path
from typing import Any

from zerolora.data.prepared_rows import open_split
from zerolora.errors import UserError
from zerolora.files import MANIFEST, sha256
from zerolora.model import foreign

COMMAND = "zerolora stage reference"
SPLITS = ("train", "validation")


def with_reference(rows: Any, data: Path, reference: Path, split: str) -> Any:
    """Return a split of `data` with the columns of directory `reference`. Raises UserError if these are of other
    rows."""
    from datasets import concatenate_datasets

    columns = open_split(reference, split)
    known = foreign.manifest(reference / MANIFEST, COMMAND, "data_manifest_sha256")["data_manifest_sha256"]
    if known != sha256(data / MANIFEST) or len(columns) != len(rows):
        raise UserError(f"{reference}: has the log-probabilities of other rows than {data}; run `{COMMAND}` again")
    return concatenate_datasets([rows, columns], axis=1)
