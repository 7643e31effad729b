"""Gives a merged model the tokens that training added: its tokenizer, and the number of rows in its config."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from zerolora import foreign
from zerolora.added_tokens import AddedToken
from zerolora.files import write_json
from zerolora.json_kinds import NUMBER, check, record
from zerolora.prompt_format import add_to_tokenizer
from zerolora.weight_files import WEIGHT_INDEX


def write_tokens(model: Path, tokens: Iterable[AddedToken], rows: int) -> None:
    """Add tokens to the tokenizer of directory `model`, and write that its embedding has so many rows.

    Raises UserError if a token would get another number than it was trained with.
    """
    add_to_tokenizer(model, tokens)
    config = foreign.model_config(model)
    for part in (config, config.get("text_config") or {}):
        if "vocab_size" in part:
            part["vocab_size"] = rows
    write_json(model / "config.json", config)


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
