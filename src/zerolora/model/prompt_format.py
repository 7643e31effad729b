"""The prompt format of training in the files of a merged model or an adapter: chat template, stop tokens, padding
token, added tokens. Generation needs no other file.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken as Token
from tokenizers import Tokenizer

from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, write_json, write_text
from zerolora.model import foreign
from zerolora.model.added_tokens import AddedToken
from zerolora.model.architecture import tokenizer_of
from zerolora.model.bounded_tokenizer import BoundedTokenizer
from zerolora.model.foreign import GENERATION, TOKENIZER, TOKENIZER_CONFIG


def write_prompt_format(data: Path, model: Path, base: Path | None = None) -> None:
    """Write the chat template of prepared `data` into the directory `model`, the stop tokens and the padding token into
    its generation_config.json, and the padding token into its tokenizer_config.json if that has none.

    `base` is the base model of an adapter directory; by default `model` has its files. Unchanged files are not written.
    """
    prepared = foreign.manifest(data / MANIFEST, "zerolora stage prepare", "files", "chat_template", "stop_tokens")
    source = model if base is None else base
    if prepared["chat_template"] is not None:
        write_text(model / "chat_template.jinja", prepared["chat_template"])
    generation, config = foreign.generation_config(source), foreign.model_config(source)
    ends = _listed(generation.get("eos_token_id", config.get("eos_token_id")))
    pad = prepared.get("pad_token")
    # Tokens of the tokenizer (data/special_tokens.py), or added to it.
    numbers = _numbers(model if (model / TOKENIZER).is_file() else source, [*prepared["stop_tokens"], pad])
    stops = sorted(numbers[token] for token in prepared["stop_tokens"])
    wanted = dict(generation)
    if not set(stops) <= set(ends):
        wanted["eos_token_id"] = [*ends, *(number for number in stops if number not in ends)]
    elif base is not None and ends:
        wanted["eos_token_id"] = ends
    if pad is not None and generation.get("pad_token_id") != numbers[pad]:
        wanted["pad_token_id"] = numbers[pad]
    if wanted != generation or base is not None:
        write_json(model / GENERATION, wanted)
    if pad is not None and (model / TOKENIZER_CONFIG).is_file():
        settings = foreign.tokenizer_config(model)
        if settings.get("pad_token") is None:
            write_json(model / TOKENIZER_CONFIG, settings | {"pad_token": pad})


def write_adapter_format(data: Path, base: Path, adapter: Path, tokens: Iterable[AddedToken]) -> None:
    """Write the prompt format into an adapter directory, and the tokenizer if tokens were added to it.

    Raises UserError if a token would get another id than in training.
    """
    if tokens := list(tokens):
        for name in (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json"):
            if (base / name).exists():
                shutil.copyfile(base / name, adapter / name)
        add_to_tokenizer(adapter, tokens)
    write_prompt_format(data, adapter, base)


def add_to_tokenizer(model: Path, tokens: Iterable[AddedToken]) -> None:
    """Add tokens to the tokenizer of directory `model`.

    The files are edited, since transformers' save_pretrained omits keys such as add_bos_token. Raises UserError if a
    token would get another id than in training.
    """
    path, tokenizer, settings = model / TOKENIZER, vocabulary(model), foreign.tokenizer_config(model)
    known = tokenizer.get_vocab()
    for each in tokens:
        token = Token(each.token, special=each.special, normalized=False)
        (tokenizer.add_special_tokens if each.special else tokenizer.add_tokens)([token])
        if (number := tokenizer.token_to_id(each.token)) != each.id:
            why = (
                "the base's tokenizer has it already"
                if each.token in known
                else f"the base's tokenizer has {len(known):,} tokens without it, and had another number"
            )
            raise UserError(
                f"{path}: {shown(each.token)} is token {number} there, and was trained as {each.id}: {why}; use the "
                "base that the adapter was trained on, with its tokenizer"
            )
        if settings.get("added_tokens_decoder") is not None:  # of transformers before version 5
            settings["added_tokens_decoder"][str(each.id)] = token.__getstate__()
    tokenizer.save(str(path))
    write_json(model / TOKENIZER_CONFIG, settings)


def write_tokens(model: Path, tokens: Iterable[AddedToken], rows: int) -> None:
    """Add tokens to the tokenizer of directory `model`, and set its config's vocab_size to `rows`.

    Raises UserError if a token would get another id than in training.
    """
    add_to_tokenizer(model, tokens)
    config = foreign.model_config(model)
    for part in (config, config.get("text_config") or {}):
        if "vocab_size" in part:
            part["vocab_size"] = rows
    write_json(model / "config.json", config)


def stop_tokens(directory: Path, model: Any) -> set[int]:
    """Return the ids of the tokens that end an answer, from generation_config.json; without one, transformers' ids for
    `model`."""
    path = directory / GENERATION
    if not path.is_file():
        return set(_listed(model.generation_config.eos_token_id))
    return set(_listed(foreign.generation_config(directory).get("eos_token_id")))


def padding(directory: Path, tokenizer: Any, stops: set[int]) -> int:
    """Return the id of the padding token: that of generation_config.json, else the tokenizer's, else a stop token.
    Padding is masked, so any token serves."""
    named = foreign.generation_config(directory).get("pad_token_id")
    return int(next(number for number in (named, tokenizer.pad_token_id, *sorted(stops), 0) if number is not None))


def _listed(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _numbers(directory: Path, tokens: Iterable[str | None]) -> dict[str, int]:
    wanted = [token for token in tokens if token is not None]
    if not wanted:
        return {}
    # Older tokenizers have no tokenizer.json; transformers reads them.
    known = vocabulary(directory).get_vocab() if (directory / TOKENIZER).is_file() else tokenizer_of(directory).vocab
    return {token: known[token] for token in wanted}


def vocabulary(directory: Path) -> Any:
    """Return the tokenizer of a directory's tokenizer.json. Raises UserError if it cannot be read."""
    with foreign.tokenizer_errors(directory):
        return BoundedTokenizer(Tokenizer.from_file(str(directory / TOKENIZER)), str(directory / TOKENIZER))
