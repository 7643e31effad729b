"""From pieces of text to tokens and labels, each row checked by reading its tokens back."""

import json
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.data.example import BadRow
from zerolora.data.rows import IGNORED
from zerolora.errors import UserError, shown

# Put before a piece that does not begin its text, where a tokenizer would add a blank to it; taken off again.
ANCHORS = ("\n", ")", "a", "0")


class Piece(NamedTuple):
    """A part of a row's text. `role` is that of the turn it is, None for what stands between turns."""

    text: str
    role: str | None
    learned: bool


class Encoded(NamedTuple):
    """A row's tokens, and what is known of them: labels as long as input_ids, the first of them never learned, as
    nothing predicts it; the tokens before the last answer (0 if there is none); and the learned tokens by role."""

    input_ids: list[int]
    labels: list[int]
    prompt: int
    learned: dict[str, int]


class Encoder:
    """Turns pieces into tokens. A piece's tokens are its own: none spans two pieces.

    So a prompt has the very tokens that it has when the model is asked. Raises UserError for a tokenizer without the
    `tokenizers` backend, whose tokens cannot be had without running a model's own code.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"the model's tokenizer ({type(tokenizer).__name__}) has no tokenizer.json; choose a model that has one"
            )
        self.backend = tokenizer.backend_tokenizer
        self.bos = tokenizer.bos_token
        self.added = tokenizer.added_tokens_decoder
        alone, behind, break_ = self._ids(["xx", "\nxx", "\n"])
        # The same text has other tokens at the start than behind others, or behind a token that takes its blanks.
        self.depends = behind != break_ + alone or any(token.rstrip for token in self.added.values())

    def encode(self, rows: list[list[Piece]]) -> list[Encoded | BadRow]:
        """Return tokens and labels of each row, or what is wrong with it: learned text that cannot be read back."""
        tokens = self._ids([piece.text for row in rows for piece in row])
        if self.depends:
            tokens = self._behind_others(rows, tokens)
        learned = [piece.learned for row in rows for piece in row]
        texts = iter(
            self.backend.decode_batch(
                [ids for ids, wanted in zip(tokens, learned, strict=True) if wanted], skip_special_tokens=False
            )
        )
        result: list[Encoded | BadRow] = []
        start = 0
        for row in rows:
            parts = tokens[start : start + len(row)]
            start += len(row)
            back = [next(texts) if piece.learned else None for piece in row]
            result.append(_row(row, parts, back))
        return result

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _behind_others(self, rows: list[list[Piece]], alone: list[list[int]]) -> list[list[int]]:
        """Return the tokens of pieces as they stand in their rows, given those that each has alone."""
        tokens = list(alone)
        places, texts, anchors = [], [], []
        number = 0
        for row in rows:
            for place, piece in enumerate(row):
                # BOS as a piece of its own is what the tokenizer puts before a text: the text begins behind it.
                if place > 1 or (place == 1 and row[0].text != self.bos):
                    places.append(number)
                    texts.append(piece.text)
                    anchors.append(self._anchor(piece, alone[number - 1]))
                number += 1
        both = self._ids([anchor + text for anchor, text in zip(anchors, texts, strict=True)])
        known = dict(zip(ANCHORS, self._ids(list(ANCHORS)), strict=True))
        for number, text, anchor, found in zip(places, texts, anchors, both, strict=True):
            before = known.get(anchor) or self._ids([anchor])[0]
            tokens[number] = found[len(before) :] if found[: len(before)] == before else self._behind_any(text, known)
        return tokens

    def _anchor(self, piece: Piece, before: list[int]) -> str:
        """Return a text that makes a piece's tokens what they are behind these."""
        token = self.added.get(before[-1]) if before else None
        if token is None or (token.rstrip and piece.role and piece.text[0].isspace()):
            return ANCHORS[0]
        return str(token.content)

    def _behind_any(self, text: str, known: dict[str, list[int]]) -> list[int]:
        for anchor, before in known.items():
            found = self._ids([anchor + text])[0]
            if found[: len(before)] == before:
                return found[len(before) :]
        raise UserError(
            f"the model's tokenizer does not keep {shown(text)} apart from what stands before it; write template: plain"
        )


def generation_stops(tokenizer: Any, model: Path | None) -> set[str]:
    """Return the tokens that the generation_config.json in a model's directory ends an answer with."""
    if model is None or not (path := model / "generation_config.json").is_file():
        return set()
    found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") or []
    return set(filter(None, tokenizer.convert_ids_to_tokens(found if isinstance(found, list) else [found])))


def _row(row: list[Piece], parts: list[list[int]], back: list[str | None]) -> Encoded | BadRow:
    input_ids: list[int] = []
    labels: list[int] = []
    learned: dict[str, int] = {}
    prompt = 0
    for piece, ids, text in zip(row, parts, back, strict=True):
        if piece.role == "assistant":
            prompt = len(input_ids)
        if text is None:
            labels += [IGNORED] * len(ids)
        elif not _same(text, piece):
            return BadRow(
                f"the tokenizer reads {shown(piece.text)} back as {shown(text)}; remove the characters it does not know"
            )
        else:
            labels += ids
            learned[piece.role or "context"] = learned.get(piece.role or "context", 0) + len(ids)
        input_ids += ids
    if labels and labels[0] != IGNORED:
        labels[0] = IGNORED
        learned[next(iter(learned))] -= 1
    if labels.count(IGNORED) == len(labels):
        return BadRow("it has no token that the loss would see; remove it")
    return Encoded(input_ids, labels, prompt, learned)


def _same(text: str, piece: Piece) -> bool:
    """Tell whether decoded text is what was written.

    Decoders of some tokenizers drop one blank at the start. Around special tokens, which a turn has at its end only,
    some add or take blanks. Some tokenizers write accents in Unicode's normal form.
    """
    if piece.text in (text, f" {text}"):
        return True
    written = unicodedata.normalize("NFC", piece.text)
    whole = piece.role in (None, "text") and "".join(written.split()) == "".join(text.split())
    return whole or written in (text, f" {text}")
