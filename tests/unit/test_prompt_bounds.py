"""Which texts of a request to `zerolora serve` count as its prompt."""

from typing import Any

import pytest

from zerolora.chatting.prompt_bounds import _texts


@pytest.mark.parametrize("text", ["data: 1 2 3", "data:text/plain;base64,AAAA"])
def test_a_text_counts_whatever_it_begins_with_and_an_address_does_not(text: str) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}, {"image_url": {"url": f"{text} of an image"}}]
    assert list(_texts({"messages": [{"content": text}, {"content": parts}]})) == [text, "text", text]
