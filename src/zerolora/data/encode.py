"""From pieces of text to tokens and labels, each row checked by reading its tokens back."""

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers.decoders import ByteLevel

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


class Span(NamedTuple):
    """Learned tokens that stand together: from `start` to before `end` in their row, and the role of their turn."""

    start: int
    end: int
    role: str

    def moved(self, places: int) -> "Span":
        """Return it so many places further on."""
        return Span(self.start + places, self.end + places, self.role)


class Encoded(NamedTuple):
    """A row's tokens, and what is known of them: the learned ones in order, the first of all never among them, as
    nothing predicts it; and the tokens before the last answer (0 if there is none)."""

    input_ids: list[int]
    spans: list[Span]
    prompt: int

    @property
    def labels(self) -> list[int]:
        """Return labels as long as input_ids: the token where it is learned, IGNORED elsewhere."""
        labels = [IGNORED] * len(self.input_ids)
        for start, end, _ in self.spans:
            labels[start:end] = self.input_ids[start:end]
        return labels


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
        self.cut: Callable[[str], list[str]] | None = None
        alone, behind, break_ = self._ids(["xx", "\nxx", "\n"])
        added = self.added.values()
        # The same text has other tokens at the start than behind others, or behind a token that takes its blanks.
        self.depends = behind != break_ + alone or any(token.rstrip for token in added)
        normalizes = self.backend.normalizer is not None
        if not self.depends and not any(
            token.lstrip or token.single_word or (token.normalized and normalizes) for token in added
        ):
            # Then added tokens cut a text into parts that have tokens of their own, wherever they stand.
            self.cut = re.compile(f"({any_of(token.content for token in added)})").split
        self.spelling = _Spelling(self.backend) if isinstance(self.backend.decoder, ByteLevel) else None

    def encode(self, rows: list[list[Piece]]) -> list[Encoded | BadRow]:
        """Return tokens and labels of each row, or what is wrong with it: learned text that cannot be read back."""
        pieces = [piece for row in rows for piece in row]
        tokens = self._ids([piece.text for piece in pieces])
        if self.depends:
            tokens = self._behind_others(rows, tokens)
        learned = [
            number
            for number, (piece, ids) in enumerate(zip(pieces, tokens, strict=True))
            if piece.learned and not (self.spelling and self.spelling.of(ids) == piece.text.encode())
        ]
        texts = self.backend.decode_batch([tokens[number] for number in learned], skip_special_tokens=False)
        wrong = {number: text for number, text in zip(learned, texts, strict=True) if not _same(text, pieces[number])}
        result: list[Encoded | BadRow] = []
        start = 0
        for row in rows:
            end = start + len(row)
            unread = next((number for number in range(start, end) if number in wrong), None) if wrong else None
            if unread is None:
                result.append(_row(row, tokens[start:end]))
            else:
                result.append(
                    BadRow(
                        f"the tokenizer reads {shown(pieces[unread].text)} back as {shown(wrong[unread])}; "
                        "remove the characters it does not know"
                    )
                )
            start = end
        return result

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if self.cut is None:
            return [found.ids for found in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        # What a template writes around contents stands in every row, and is tokenized once.
        cut = [self.cut(text) for text in texts]
        parts = list(dict.fromkeys(itertools.chain.from_iterable(cut)))
        found = self.backend.encode_batch_fast(parts, add_special_tokens=False)
        ids = {part: encoding.ids for part, encoding in zip(parts, found, strict=True)}
        return [[token for part in parts for token in ids[part]] for parts in cut]

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


class _Spelling:
    """What tokens stand for, with a decoder that does no more than put their bytes one behind the other."""

    def __init__(self, backend: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.backend = backend
        self.alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        self.known: dict[int, bytes] = {}

    def of(self, ids: list[int]) -> bytes:
        """Return the bytes of these tokens together."""
        known = self.known
        try:
            return b"".join([known[token] for token in ids])
        except KeyError:
            known.update((token, self._learn(token)) for token in set(ids) - known.keys())
            return self.of(ids)

    def _learn(self, token: int) -> bytes:
        text = self.backend.id_to_token(token)
        spelt = bytes(map(self.alphabet.__getitem__, text)) if self.alphabet.keys() >= set(text) else text.encode()
        # Bytes that no text has, where the decoder says otherwise: it will be asked again.
        decoded = self.backend.decode([token], skip_special_tokens=False)
        return spelt if spelt.decode(errors="replace") == decoded else b"\xff"


def _row(row: list[Piece], parts: list[list[int]]) -> Encoded | BadRow:
    input_ids: list[int] = []
    spans: list[Span] = []
    prompt = 0
    for (_, role, learned), ids in zip(row, parts, strict=True):
        start = len(input_ids)
        input_ids += ids
        if role == "assistant":
            prompt = start
        if learned and len(input_ids) > max(start, 1):
            spans.append(Span(max(start, 1), len(input_ids), role or "context"))
    if not spans:
        return BadRow("it has no token that the loss would see; remove it")
    return Encoded(input_ids, spans, prompt)


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


def any_of(words: Iterable[str]) -> str:
    """Return a pattern of any of the words, the longest first; one that never matches if there is none."""
    return "|".join(map(re.escape, sorted(filter(None, words), key=len, reverse=True))) or r"(?!)"
