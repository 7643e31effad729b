"""Tokens that a data set adds to its model's tokenizer, and their rows in the model's embedding and head.

`prepare` adds them and lists them in its manifest; training writes the list beside its output, for merge.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError, shown
from zerolora.files import MANIFEST, read_json, write_json
from zerolora.json_kinds import check
from zerolora.model import foreign

if TYPE_CHECKING:
    import torch

FILE = "tokens.json"
"""Name of the list in a directory of trained weights."""
SUMMED = 4096
"""Rows that are summed in fp64 at a time."""


@dataclass(frozen=True)
class AddedToken:
    """A token that the model's own tokenizer lacks."""

    token: str
    id: int
    special: bool
    """Part of the prompt format: messages may not contain it, and answers are shown without it."""


def extend(tokenizer: Any, special: Iterable[str], others: Iterable[str]) -> list[AddedToken]:
    """Add tokens to a tokenizer, in place, and return them, the special ones first.

    Raises UserError for a token that it has already.
    """
    names = [(token, True) for token in special] + [(token, False) for token in others]
    known = tokenizer.get_vocab()
    for token, is_special in names:
        if token in known:
            key = "add_special_tokens" if is_special else "add_tokens"
            raise UserError(
                f"prepare: {key}: {shown(token)} is token {known[token]} of the model's own tokenizer; leave it out"
            )
    _add(tokenizer, names)
    numbers = tokenizer.convert_tokens_to_ids([token for token, _ in names])
    return [AddedToken(token, number, kind) for (token, kind), number in zip(names, numbers, strict=True)]


def extend_again(tokenizer: Any, tokens: Iterable[AddedToken]) -> None:
    """Add tokens that `extend` returned to a tokenizer, in place; a merged model's tokenizer has them already."""
    known, tokens = tokenizer.get_vocab(), list(tokens)
    _add(tokenizer, [(each.token, each.special) for each in tokens if each.token not in known])
    numbers = tokenizer.convert_tokens_to_ids([each.token for each in tokens])
    for each, number in zip(tokens, numbers, strict=True):
        if number != each.id:
            raise UserError(
                f"{shown(each.token)} is token {each.id} of the prepared data, and {number} of this model's tokenizer; "
                "prepare the data with this model"
            )


def _add(tokenizer: Any, tokens: Iterable[tuple[str, bool]]) -> None:
    from tokenizers import AddedToken as Token

    for token, special in tokens:
        # A normalizer must not change the text before the token is matched.
        tokenizer.add_tokens([Token(token, special=special, normalized=False)], special_tokens=special)


def of_data(data: Path) -> list[AddedToken]:
    """Return the tokens that a prepared data set adds."""
    return _tokens(foreign.manifest(data / MANIFEST, "zerolora stage prepare").get("added_tokens", []))


def of_directory(directory: Path) -> list[AddedToken]:
    """Return the added tokens in the directory of an adapter or of whole weights.

    Raises UserError if tokens.json is not a list of tokens.
    """
    path = directory / FILE
    if not path.is_file():
        return []
    listed = read_json(path, "zerolora stage train")
    check(listed, list[foreign.TokenEntry], path, "delete it and run `zerolora stage train` again")
    return _tokens(listed)


def _tokens(listed: list[dict[str, Any]]) -> list[AddedToken]:
    return [AddedToken(each["token"], each["id"], each["special"]) for each in listed]


def write(directory: Path, tokens: Iterable[AddedToken]) -> None:
    """Write tokens beside trained weights; nothing if there are none."""
    if listed := [asdict(each) for each in tokens]:
        write_json(directory / FILE, listed)


def rows_needed(rows: int, tokens: Iterable[AddedToken]) -> int:
    """Return the rows that an embedding of `rows` rows needs for added tokens: some models have spare rows."""
    return max([rows, *(each.id + 1 for each in tokens)])


def add_rows(model: Any, tokens: Iterable[AddedToken]) -> list[int]:
    """Give a transformers model a row of embedding and head for each token, in place; also on the meta device.

    Both are resized if they have too few rows. New rows start as the fp64 mean of the rows before them, so they are
    the same on every rank and device. Collective where weights are sharded (stage 3). Returns the sorted indices of the
    rows: those of the tokens, and those for tokens that the tokenizer already had but the model lacked.
    """
    tokens = list(tokens)
    if not tokens:
        return []
    before = model.config.get_text_config().vocab_size
    rows = rows_needed(before, tokens)
    if rows > before:
        model.resize_token_embeddings(rows, mean_resizing=False)
    numbers = sorted({each.id for each in tokens} | set(range(before, rows)))
    weights = [each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())]
    for part in {id(weight): weight for weight in weights}.values():
        with _gathered(part):
            if part.device.type != "meta":
                part.data[numbers] = mean_row(part.data[: numbers[0]].split(SUMMED)).to(part.dtype)
    return numbers


def mean_row(parts: "Iterable[torch.Tensor]") -> "torch.Tensor":
    """Return the fp64 mean of rows that come in parts, the first value of added tokens' rows."""
    import torch

    total, count = None, 0
    for part in parts:
        summed = part.double().sum(0)
        total = summed if total is None else total + summed
        count += len(part)
    assert total is not None
    return torch.as_tensor(total / count)


@contextlib.contextmanager
def _gathered(weight: Any) -> Iterator[None]:
    """Gather a weight that DeepSpeed may have sharded, and broadcast what rank 0 writes to it."""
    if not hasattr(weight, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        yield
