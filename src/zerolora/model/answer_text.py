"""The text of a generated answer: without the stop token, and where a text ends it."""

import bisect
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

MARGIN = 8
"""Tokens before those that may hold a stop text: decoders strip or join what a text begins with."""
UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no character, such as the first ones of a longer character."""


class AnswerText(NamedTuple):
    """An answer as a text."""

    text: str
    """Not cut at a stop text, which its last token may contain."""
    tokens: int
    """Generated tokens, up to and including the one that ended it."""
    ended: bool
    """Whether a stop token or a stop text ended it."""
    whole: bool
    """Whether the text has all that was generated: no special token before the end, no part of a character."""


class AnswerTexts:
    """Decodes the answers of a model with some stop tokens and stop texts."""

    def __init__(self, tokenizer: Any, stops: Collection[int], until: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops, self.until = tokenizer, stops, until
        self._special = {*tokenizer.all_special_ids} if until else set()
        # A token that is not special has at least one byte.
        self._tail = max((len(end.encode()) for end in until), default=0) + MARGIN

    def ended(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token of an answer completes a stop text, in a time that does not grow with it."""
        tail: list[int] = []
        for token in reversed(tokens):
            if token not in self._special:
                tail.append(token)
                if len(tail) == self._tail:
                    break
        return self._has_end(tail[::-1]) and self._has_end(tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without its stop token, which some tokenizers do not count as special."""
        without = tokens[:-1] if tokens and tokens[-1] in self.stops else tokens
        text: str = self.tokenizer.decode(without, skip_special_tokens=True)
        return text

    def of(self, tokens: Sequence[int]) -> AnswerText:
        """Return an answer up to the token that completed the first stop text: it may have gone on with others of its
        batch."""
        if self._has_end(tokens):
            lengths = range(1, len(tokens) + 1)
            tokens = tokens[: bisect.bisect_left(lengths, True, key=lambda length: self._has_end(tokens[:length])) + 1]
        at_stop = bool(tokens) and tokens[-1] in self.stops
        text = self.text(tokens)
        everything = self.tokenizer.decode(tokens[: len(tokens) - at_stop], skip_special_tokens=False)
        return AnswerText(
            text, len(tokens), at_stop or self._has_end(tokens), text == everything and UNFINISHED not in text
        )

    def _has_end(self, tokens: Sequence[int]) -> bool:
        if not self.until:
            return False
        text = self.text(tokens)
        return any(end in text for end in self.until)
