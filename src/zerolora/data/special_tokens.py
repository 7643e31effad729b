"""The special tokens of a prompt format: its own, the stop tokens, and padding.

Each must be a single token of the tokenizer, with a row in the model's embeddings.
"""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from zerolora.config.settings import PrepareSettings
from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.errors import UserError, shown
from zerolora.model import foreign

SHOWN = 8  # tokens in a message


def embedding_rows(model: Path | None, tokenizer: Any, settings: PrepareSettings) -> int | None:
    """Return the rows of the embeddings according to config.json, with those that training adds for the tokens of
    `settings`; None if unknown. tokenizer: with these tokens."""
    if model is None or not (model / foreign.CONFIG).exists():
        return None
    config = foreign.model_config(model)
    rows = (config.get("text_config") or {}).get("vocab_size") or config.get("vocab_size")
    if not isinstance(rows, int):
        return None
    added: list[int] = tokenizer.convert_tokens_to_ids([*settings.add_special_tokens, *settings.add_tokens])
    return max([rows, *(number + 1 for number in added)])


class SpecialTokens:
    """The special tokens of a tokenizer, its model and the settings `stop_tokens` and `pad_token`.

    known: tokens that are never split, and have a row in the embeddings. end: `eos_token` in a template. stops: the
    tokens that end an answer, from the settings (`set_by_user`), otherwise from the tokenizer and the model's
    generation_config.json.

    Raises UserError, with the setting to change, if no token ends an answer, or if one of these is not known.
    """

    def __init__(self, tokenizer: Any, settings: PrepareSettings, model: Path | None) -> None:
        self.rows = embedding_rows(model, tokenizer, settings)
        self.known = [
            token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if self.rows is None or number < self.rows
        ]
        self.set_by_user = bool(settings.stop_tokens)
        if settings.stop_tokens:
            for token in settings.stop_tokens:
                self._check("stop_tokens", token)
            self.end, self.stops = settings.stop_tokens[0], set(settings.stop_tokens)
            return
        if tokenizer.eos_token is None:
            raise UserError(
                "the model's tokenizer has no eos_token, so nothing would end an answer; set stop_tokens: [TOKEN], "
                f"{self._some()}"
            )
        self.end = tokenizer.eos_token
        self.stops = {self.end, *generation_stops(tokenizer, model)}

    def padding(self, tokenizer: Any, pad_token: str | None, stops: set[str]) -> str:
        """Return the token that pads batches of prompts: `pad_token`, the tokenizer's own, or `end`.

        Padding is masked, so any token works. Raises UserError if `pad_token` is one of `stops`, or if the token has no
        row in the embeddings.
        """
        if pad_token is not None:
            self._check("pad_token", pad_token)
            if pad_token in stops:
                raise UserError(
                    f"pad_token: {pad_token} ends an answer; a tool that takes padding out of the loss would take the "
                    f"end of every answer with it, so use another, {self._some(stops)}"
                )
            return pad_token
        own: str | None = tokenizer.pad_token
        if own is None:
            return self.end
        if self.rows is not None and tokenizer.pad_token_id >= self.rows:
            raise UserError(
                f"the tokenizer's pad_token {own} is token {tokenizer.pad_token_id}, but the model's embeddings have "
                f"{self.rows} rows; set pad_token: TOKEN, {self._some(stops)}"
            )
        return own

    def check_format(self, name: str) -> None:
        """Raise UserError, naming the formats that the model supports, if it lacks a token of a format."""
        if lacking := [token for token in PROMPT_FORMATS[name].tokens if token not in self.known]:
            raise UserError(
                f"template: {name} writes {lacking[0]}, which the model does not have as one token; use a format "
                f"whose tokens it has: {', '.join(self.fitting())}; or add_special_tokens: {json.dumps(lacking)}"
            )

    def fitting(self) -> list[str]:
        """Return the names of the formats whose tokens the model has."""
        return ["plain", *(name for name, each in PROMPT_FORMATS.items() if set(each.tokens) <= set(self.known))]

    def _check(self, key: str, token: str) -> None:
        if token not in self.known:
            raise UserError(
                f"{key}: {shown(token)} is not a single token of the model; use {self._some()}, or add it with "
                "add_special_tokens"
            )

    def _some(self, less: Set[str] = frozenset()) -> str:
        names = [token for token in self.known if token not in less]
        shortened = [*names[:SHOWN], "..."] if len(names) > SHOWN else names
        return f"one of {', '.join(shortened)}"


def generation_stops(tokenizer: Any, model: Path | None) -> set[str]:
    """Return the end-of-sequence tokens of the generation_config.json in a model's directory."""
    named = None if model is None else foreign.generation_config(model).get("eos_token_id")
    if named is None or isinstance(named, bool):
        return set()
    numbers = [number for number in (named if isinstance(named, list) else [named]) if 0 <= number < len(tokenizer)]
    return set(filter(None, tokenizer.convert_ids_to_tokens(numbers)))
