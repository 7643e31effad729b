"""Free-form answers: texts of which no two are alike, or long ones, which hardly any answer equals.

Their exact match is near 0 before and after, whatever the training achieved. Their loss says it, and bits per byte,
which is comparable between tokenizers.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from zerolora.data.prepared_rows import IGNORED

FREE_FORM, BITS = "free_form", "bits_per_byte"
"""Keys of evaluate.json: whether the answers are free-form, and -log2 of their probability per byte of UTF-8."""
LONG = 50
"""Characters of half of the answers from which they are called long: a sentence."""
FEW = 10
"""Answers of which no two may be alike by chance."""


def is_free_form(expected: Sequence[str]) -> bool:
    """Return whether the data's answers to some prompts are free-form."""
    texts = [text.strip() for text in expected]
    are_unlike = len(texts) >= FEW and len({*texts}) == len(texts)
    return are_unlike or (bool(texts) and median(map(len, texts)) >= LONG)


def supervised_bytes(tokenizer: Any, rows: Any) -> int:
    """Return the bytes of the rows' supervised texts in UTF-8, without special tokens."""
    supervised = [[label for label in labels[1:] if label != IGNORED] for labels in rows["labels"]]
    return sum(len(tokenizer.decode(tokens, skip_special_tokens=True).encode()) for tokens in supervised)


def bits_per_byte(nats: float, size: int) -> float:
    """Return bits per byte from the summed cross-entropy of a text of `size` bytes (arXiv 2101.00027, 3.1)."""
    return nats / math.log(2) / size
