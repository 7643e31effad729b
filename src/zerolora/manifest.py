"""What a model directory holds: sizes, hashes, parameter count, without loading a tensor."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.files import read_json

WEIGHTS = "*.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"


def check_loadable(directory: Path) -> None:
    """Raise UserError unless `directory` has config.json, a tokenizer and safetensors weights."""
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory; write the path of a model directory")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: has no config.json, so it is no transformers model; write another path")
    if not any(directory.glob("tokenizer*")):
        raise UserError(f"{directory}: has no tokenizer files; save the model's tokenizer there")
    if not any(directory.glob(WEIGHTS)):
        raise UserError(
            f"{directory}: has no .safetensors weights; save the model with save_pretrained "
            "(pickled weights such as pytorch_model.bin are not read)"
        )


def count_parameters(directory: Path) -> int:
    """Return the number of parameters stored in the directory's safetensors files, from their headers.

    A tied tensor is stored once and counted once. Raises UserError for a broken file.
    """
    return sum(_stored(path) for path in sorted(directory.glob(WEIGHTS)))


def is_weight(name: str) -> bool:
    """Tell whether a file of a model directory holds weights (gigabytes) rather than settings."""
    return name.endswith(".safetensors")


def located(stamp: Path) -> Path:
    """Return the directory that a stamp `{"path", "files"}` names, after a look at the sizes of its files.

    Raises UserError if a file is missing or has another size than when it was checked.
    """
    record: dict[str, Any] = read_json(stamp, "zerolora weights")
    directory = Path(record["path"])
    for name, file in record["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            raise UserError(f"{path}: is missing or has changed since it was checked; delete {stamp} and run again")
    return directory


def _stored(path: Path) -> int:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (struct.error, ValueError, KeyError, MemoryError, OverflowError):
        raise UserError(f"{path}: is not a whole safetensors file; fetch the model again") from None
