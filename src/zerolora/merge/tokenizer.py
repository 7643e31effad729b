"""Gives a merged model the tokens that training added: its tokenizer, and the number of rows in its config."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken as Token
from tokenizers import Tokenizer

from zerolora.added_tokens import AddedToken
from zerolora.errors import UserError, shown
from zerolora.files import read_json, write_json
from zerolora.manifest import WEIGHT_INDEX


def write_tokens(model: Path, tokens: Iterable[AddedToken], rows: int) -> None:
    """Add tokens to the tokenizer of directory `model`, and write that its embedding has so many rows.

    The files are edited, not written anew by transformers, whose save_pretrained leaves out keys such as add_bos_token.
    Raises UserError if a token would get another number than it was trained with.
    """
    path = model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    settings: dict[str, Any] = read_json(model / "tokenizer_config.json", "save_pretrained")
    for each in tokens:
        token = Token(each.token, special=each.special, normalized=False)
        (tokenizer.add_special_tokens if each.special else tokenizer.add_tokens)([token])
        if (number := tokenizer.token_to_id(each.token)) != each.id:
            raise UserError(
                f"{path}: {shown(each.token)} is token {number} there, and was trained as {each.id}; this adapter was "
                "trained on another model"
            )
        if "added_tokens_decoder" in settings:  # of transformers before version 5
            settings["added_tokens_decoder"][str(each.id)] = token.__getstate__()
    tokenizer.save(str(path))
    write_json(model / "tokenizer_config.json", settings)
    config = read_json(model / "config.json", "save_pretrained")
    for part in (config, config.get("text_config") or {}):
        if "vocab_size" in part:
            part["vocab_size"] = rows
    write_json(model / "config.json", config)


def write_size(model: Path, parameters: int, size: int) -> None:
    """Add so many parameters, and bytes, to what the index of a model's weight files says, if there is one."""
    path = model / WEIGHT_INDEX
    if not path.is_file():
        return
    index = read_json(path, "save_pretrained")
    more = {"total_parameters": parameters, "total_size": size}
    index["metadata"] = {name: value + more.get(name, 0) for name, value in index.get("metadata", {}).items()}
    write_json(path, index)
