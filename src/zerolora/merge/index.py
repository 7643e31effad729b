"""Adds to the index of a merged model's weight files what a merge adds to the weights."""

from collections.abc import Mapping
from pathlib import Path

from zerolora.files import write_json
from zerolora.json_file import NUMBER, check, record
from zerolora.model import foreign
from zerolora.model.weight_files import WEIGHT_INDEX


def write_size(model: Path, parameters: int, size: int, added: Mapping[str, str] | None = None) -> None:
    """Add so many parameters, so many bytes, and tensors by the name of their file to the index of a model's weight
    files, if there is one."""
    path = model / WEIGHT_INDEX
    if not path.is_file():
        return
    index = foreign.weight_index(path)
    more = {"total_parameters": parameters, "total_size": size}
    metadata = index.get("metadata") or {}
    for name in more.keys() & metadata.keys():
        check(metadata, record({name: NUMBER}), path, foreign.FETCH_AGAIN)
        metadata[name] += more[name]
    index["metadata"] = metadata
    index["weight_map"] |= added or {}
    write_json(path, index)
