"""What requests to the judge cost: estimated before they are made, by the endpoint's own counts after."""

import math
from collections.abc import Iterable

from zerolora.config.settings import JudgeSettings

BYTES_PER_TOKEN = 3
"""Fewer than common tokenizers need for English (about 4), so that the estimate is rather too high."""
MESSAGE_TOKENS = 8
"""That a chat template adds to a message."""
MILLION = 1_000_000


def tokens_of(texts: Iterable[str]) -> int:
    """Return the estimated tokens of messages; the judge's tokenizer is not here to count them."""
    return sum(math.ceil(len(text.encode()) / BYTES_PER_TOKEN) + MESSAGE_TOKENS for text in texts)


def price(prompt_tokens: int, completion_tokens: int, settings: JudgeSettings) -> float | None:
    """Return the price of tokens in the settings' currency; None if they name no prices."""
    if settings.prompt_price is None or settings.completion_price is None:
        return None
    return (prompt_tokens * settings.prompt_price + completion_tokens * settings.completion_price) / MILLION


def most(messages: list[dict[str, str]], settings: JudgeSettings) -> tuple[int, int]:
    """Return the estimated prompt tokens of a request and the most completion tokens that it may give."""
    return tokens_of(message["content"] for message in messages), settings.judge_tokens
