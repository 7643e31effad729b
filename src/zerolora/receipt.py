"""A receipt: what a finished job was made with, and the sha256 of each file that it read and wrote.

results/receipts/<stage>@<name>.json, written by the workflow (workflow/scripts/receipts.py, docs/engine-sync.md).
"""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from zerolora.files import MANIFEST, canonical

FOLDER = Path("results/receipts")


class Receipt(NamedTuple):
    """What a finished job was made with: the values of its rule's params, and the sha256 of its files by path."""

    params: dict[str, str]
    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def digest(self) -> str:
        """Its own sha256, by which a damaged receipt is told from damaged outputs."""
        return hashlib.sha256(canonical(self._asdict()).encode()).hexdigest()

    @property
    def folders(self) -> list[str]:
        """The directories that the job wrote as a whole: those of its manifests."""
        return [os.path.dirname(path) for path in self.outputs if os.path.basename(path) == MANIFEST]  # noqa: PTH119, PTH120


def path_of(stage: str) -> Path:
    """Return the file of a stage's receipt, as of train@default."""
    return FOLDER / f"{stage}.json"


def parse(text: str) -> Receipt | None:
    """Return the receipt with this text; None if it is not one of a job that ended well."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    match value:
        case {"params": dict(params), "inputs": dict(inputs), "outputs": dict(outputs), "sha256": digest}:
            receipt = Receipt(params, inputs, outputs)
            return receipt if receipt.digest == digest else None
    return None
