"""Tokenizes pieces of text and checks each row by decoding its tokens."""

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from tokenizers.decoders import ByteLevel

from zerolora.data.example import BadRow
from zerolora.data.ragged import Ragged, bounds
from zerolora.errors import UserError, shown

CONTEXT = -1  # supervised_role of tokens that do not count in the loss
NOTHING = BadRow("no token of it is in the loss; remove it")
# Prefixes of a piece that does not begin its text, against a blank that the tokenizer would add; removed again.
ANCHORS = ("\n", ")", "a", "0")


LONG = 1 << 17
"""Characters of a text that is encoded in one call."""
NEAR = 256
"""Characters on both sides of a cut whose tokens are compared."""
TRIES = 50
"""Places where a cut is tried."""


class Piece(NamedTuple):
    """A part of a row's text. `role` is the role of its turn, None between turns."""

    text: str
    role: str | None
    supervised: bool


class Tokens(NamedTuple):
    """Tokenized rows.

    ids: the tokens of each row. supervised_role: for each token the index in `roles` of its supervised turn, CONTEXT if
    it is not in the loss; a row's first token is never predicted. prompt: the number of tokens before each row's last
    answer, 0 without one. wrong: errors by row; the tokens of such a row are invalid.
    """

    ids: Ragged
    supervised_role: np.ndarray
    prompt: np.ndarray
    roles: list[str]
    wrong: dict[int, BadRow]

    @property
    def supervised(self) -> np.ndarray:
        """The number of supervised tokens of each row."""
        return self.ids.totals(self.supervised_role != CONTEXT)


class Encoder:
    """Tokenizes pieces one by one: no token spans two, so a prompt has the same tokens in training and generation.

    Raises UserError for a tokenizer without the `tokenizers` backend, which would need the model's own code.
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
        added = self.added.values()
        # The tokens of a text may depend on what precedes it: nothing, text, or a token that absorbs blanks.
        self.depends = behind != break_ + alone or any(token.rstrip for token in added)
        self.cut: Callable[[str], list[str]] | None = None
        normalizes = self.backend.normalizer is not None
        if not self.depends and not any(
            token.lstrip or token.single_word or (token.normalized and normalizes) for token in added
        ):
            # Added tokens split a text into parts that are tokenized independently, at any position.
            self.cut = re.compile(f"({any_of(token.content for token in added)})").split
        self.spelling = _Spelling(self.backend) if isinstance(self.backend.decoder, ByteLevel) else None

    def encode(self, rows: list[list[Piece]]) -> Tokens:
        """Tokenize rows and check that their supervised tokens decode to the same text."""
        pieces = [piece for row in rows for piece in row]
        tokens = self._tokens(rows, pieces)
        roles: dict[str, int] = {}
        kinds = [
            roles.setdefault(role or "context", len(roles)) if supervised else CONTEXT for _, role, supervised in pieces
        ]
        first = bounds(map(len, rows))
        ids = tokens.joined(map(len, rows))
        supervised = np.repeat(np.array(kinds, np.int8), tokens.lengths)
        supervised[ids.heads] = CONTEXT
        answers = [start + last_answer(row) for start, row in zip(first.tolist(), rows, strict=False)]
        prompt = tokens.offsets[np.array(answers, np.int64)] - ids.offsets[:-1]
        result = Tokens(ids, supervised, prompt, list(roles), {})
        for number in np.flatnonzero(result.supervised == 0).tolist():
            result.wrong[number] = NOTHING
        for number, text in self._misread(pieces, tokens).items():
            result.wrong[int(np.searchsorted(first, number, "right")) - 1] = BadRow(
                f"the tokenizer reads {shown(pieces[number].text)} back as {shown(text)}; "
                "remove the characters it does not know"
            )
        return result

    def _misread(self, pieces: list[Piece], tokens: Ragged) -> dict[int, str]:
        """Return {index: decoded text} of the supervised pieces that decode to a different text."""
        supervised = [number for number, piece in enumerate(pieces) if piece.supervised]
        if self.spelling:
            spelt = self.spelling.of(tokens.take(np.array(supervised, np.int64)))
            supervised = [
                number
                for number, result in zip(supervised, spelt, strict=True)
                if result != pieces[number].text.encode()
            ]
        texts = self.backend.decode_batch([tokens[number].tolist() for number in supervised], skip_special_tokens=False)
        return {number: text for number, text in zip(supervised, texts, strict=True) if not _same(text, pieces[number])}

    def _tokens(self, rows: list[list[Piece]], pieces: list[Piece]) -> Ragged:
        """Return the tokens of each piece."""
        texts = [piece.text for piece in pieces]
        if self.cut is None:
            alone = self._ids(texts)
            return Ragged.of(self._behind_others(rows, alone) if self.depends else alone)
        # A template's own text occurs in every row, and is tokenized once.
        numbers: dict[str, int] = {}
        order: list[int] = []
        counts: list[int] = []
        for text in texts:
            parts = self.cut(text)
            counts.append(len(parts))
            order += [numbers.setdefault(part, len(numbers)) for part in parts]
        return Ragged.of(self._ids(list(numbers))).take(np.array(order, np.int64)).joined(counts)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text. A call of the tokenizer takes some 400 bytes for each of its tokens, so a
        long text is encoded in parts."""
        if max(map(len, texts), default=0) <= LONG:
            return self._encoded(texts)
        return [[token for part in self._parts(text) for token in self._encoded([part])[0]] for text in texts]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return [result.ids for result in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _parts(self, text: str) -> Iterator[str]:
        """Divide a text into parts of about LONG characters that have the same tokens as the whole.

        A tokenizer divides a text into words before it looks for tokens in each. So a text is cut between two words
        where the tokens of NEAR characters on both sides do not depend on each other. Without such a place it stays
        whole.
        """
        start = 0
        while len(text) - start > LONG and self.backend.pre_tokenizer is not None:
            places = (place for place in range(start + LONG - NEAR, start + NEAR, -1) if _is_between_words(text, place))
            cut = next((place for place in itertools.islice(places, TRIES) if self._is_boundary(text, place)), None)
            if cut is None:
                break
            yield text[start:cut]
            start = cut
        yield text[start:]

    def _is_boundary(self, text: str, place: int) -> bool:
        before, after = text[place - NEAR : place], text[place : place + NEAR]
        both, left, right = self._encoded([before + after, before, after])
        return both == left + right

    def _behind_others(self, rows: list[list[Piece]], alone: list[list[int]]) -> list[list[int]]:
        """Return the tokens of pieces in the context of their rows. alone: the tokens of each by itself."""
        tokens = list(alone)
        numbers, texts, anchors = [], [], []
        number = 0
        for row in rows:
            for index, piece in enumerate(row):
                # A first piece of BOS is what the tokenizer would add, so the text begins after it.
                if index > 1 or (index == 1 and row[0].text != self.bos):
                    numbers.append(number)
                    texts.append(piece.text)
                    anchors.append(self._anchor(piece, alone[number - 1]))
                number += 1
        both = self._ids([anchor + text for anchor, text in zip(anchors, texts, strict=True)])
        known = dict(zip(ANCHORS, self._ids(list(ANCHORS)), strict=True))
        for number, text, anchor, result in zip(numbers, texts, anchors, both, strict=True):
            before = known.get(anchor) or self._ids([anchor])[0]
            tokens[number] = result[len(before) :] if result[: len(before)] == before else self._behind_any(text, known)
        return tokens

    def _anchor(self, piece: Piece, before: list[int]) -> str:
        """Return a prefix after which a piece has the same tokens as after `before`."""
        token = self.added.get(before[-1]) if before else None
        if token is None or (token.rstrip and piece.role and piece.text[0].isspace()):
            return ANCHORS[0]
        return str(token.content)

    def _behind_any(self, text: str, known: dict[str, list[int]]) -> list[int]:
        for anchor, before in known.items():
            result = self._ids([anchor + text])[0]
            if result[: len(before)] == before:
                return result[len(before) :]
        raise UserError(f"the model's tokenizer joins {shown(text)} to the text before it; set template: plain")


class _Spelling:
    """The bytes of each token, for a decoder that only concatenates them."""

    def __init__(self, backend: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.backend = backend
        alphabet: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call,unused-ignore]  # typed in newer ones
        self.alphabet = {character: byte for byte, character in alphabet.items()}
        # Begin and end of each token's bytes in `self.bytes`; -1 for a token that is not in it yet.
        self.starts = np.full(max(backend.get_vocab().values()) + 1, -1)
        self.ends = self.starts.copy()
        self.bytes = np.zeros(0, np.uint8)

    def of(self, tokens: Ragged) -> list[bytes]:
        """Return the bytes of each list of tokens."""
        new = np.unique(tokens.values[self.starts[tokens.values] < 0])
        if len(new):
            spelt = Ragged.of([list(self._learn(token)) for token in new.tolist()], np.uint8)
            self.starts[new], self.ends[new] = (
                spelt.offsets[:-1] + len(self.bytes),
                spelt.offsets[1:] + len(self.bytes),
            )
            self.bytes = np.concatenate([self.bytes, spelt.values])
        written = Ragged(self.bytes, self.starts[:0]).slices(self.starts[tokens.values], self.ends[tokens.values])
        whole, at = written.values.tobytes(), written.offsets[tokens.offsets].tolist()
        return [whole[start:end] for start, end in itertools.pairwise(at)]

    def _learn(self, token: int) -> bytes:
        text = self.backend.id_to_token(token)
        spelt = bytes(map(self.alphabet.__getitem__, text)) if self.alphabet.keys() >= set(text) else text.encode()
        # For a token that decodes to another text, store a byte that no text contains: the decoder is used then.
        decoded = self.backend.decode([token], skip_special_tokens=False)
        return spelt if spelt.decode(errors="replace") == decoded else b"\xff"


def _is_between_words(text: str, place: int) -> bool:
    return text[place] == " " and text[place - 1].isalpha() and text[place + 1].isalpha()


def last_answer(row: list[Piece]) -> int:
    """Return the index of the last answer's piece, 0 if there is none."""
    return next((index for index in range(len(row) - 1, 0, -1) if row[index].role == "assistant"), 0)


def _same(text: str, piece: Piece) -> bool:
    """Return whether the decoded text equals the piece, apart from known effects of tokenizers: a dropped blank at the
    start, blanks added or removed around special tokens (only at the end of a turn), and normalized Unicode."""
    if piece.text in (text, f" {text}"):
        return True
    written = unicodedata.normalize("NFC", piece.text)
    whole = piece.role in (None, "text") and "".join(written.split()) == "".join(text.split())
    return whole or written in (text, f" {text}")


def any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, the longest first, or nothing if there are no words."""
    return "|".join(map(re.escape, sorted(filter(None, words), key=len, reverse=True))) or r"(?!)"
