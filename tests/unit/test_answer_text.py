"""The text of an answer: what ends it, and what it does not have."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from zerolora.model.answer_text import AnswerTexts
from zerolora.model.architecture import tokenizer_of

END = "<|end|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """Return a tokenizer with a stop token that it does not count as special."""
    result = tokenizer_of(tiny_model)
    result.add_tokens([AddedToken(END, special=False)])
    return result


def test_a_stop_token_is_not_in_the_text_though_it_is_not_special(tokenizer: Any) -> None:
    (stop,) = tokenizer.encode(END, add_special_tokens=False)
    tokens = [*tokenizer.encode("an answer", add_special_tokens=False), stop]
    assert AnswerTexts(tokenizer, {stop}).of(tokens) == ("an answer", len(tokens), True, True)
    assert AnswerTexts(tokenizer, set()).of(tokens) == (f"an answer{END}", len(tokens), False, True)


@pytest.mark.parametrize("text", ["<|im_start|>call", "call<|im_start|>", "\N{GREEK SMALL LETTER ALPHA}"], ids=ascii)
def test_a_text_that_lacks_a_token_or_a_byte_is_not_whole(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    tokens = tokens[:-1] if text.isalpha() else tokens
    assert not AnswerTexts(tokenizer, {2}).of([*tokens, 2]).whole
    assert AnswerTexts(tokenizer, {2}).of([*tokenizer.encode("call", add_special_tokens=False), 2]).whole


@given(st.lists(st.integers(0, 258), max_size=40), st.lists(st.sampled_from(["ab", "\n\n", "é", "x"]), max_size=3))
def test_laws_of_stop_texts(tokenizer: Any, tokens: list[int], until: list[str]) -> None:
    """An answer is the same however far its batch went on, and the time of `ended` finds the same token."""
    tokens = [*tokens, *tokenizer.encode("x ab\n\né", add_special_tokens=False)]
    texts = AnswerTexts(tokenizer, set(), until)
    whole = texts.of(tokens)
    first = next((length for length in range(1, len(tokens) + 1) if texts.ended(tokens[:length])), len(tokens))
    assert whole.tokens == first and whole.ended == bool(until)
    for length in range(first, len(tokens)):
        assert texts.of(tokens[:length]) == whole
