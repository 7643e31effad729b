"""Prepared rows of pairs and of labelled answers, with log-probabilities of a reference."""

from typing import Any

import numpy as np
from datasets import Dataset

from zerolora.data.prepared_rows import IGNORED

PROMPTS = 4
"""Prompts are shared by every fourth row."""


def texts(count: int, tokens: int, seed: int = 0, longest: int = 9) -> list[tuple[list[int], list[int], list[int]]]:
    """Return prompts, chosen and rejected answers of several lengths, of `tokens` tokens."""
    draw = np.random.default_rng(seed)

    def text(least: int) -> list[int]:
        return draw.integers(0, tokens, int(draw.integers(least, longest))).tolist()

    prompts = [text(2) for _ in range(PROMPTS)]
    return [(prompts[number % PROMPTS], text(1), text(1)) for number in range(count)]


def pairs(of: list[tuple[list[int], list[int], list[int]]], references: bool = True, sources: int = 2) -> Dataset:
    """Return the rows of pairs."""
    rows = [_pair(*each) | {"source": number % sources} for number, each in enumerate(of)]
    if references:
        for number, row in enumerate(rows):
            row |= {"reference_chosen": -3.0 - number % 5, "reference_rejected": -4.0 - number % 3}
    return Dataset.from_list(rows)


def _pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> dict[str, Any]:
    return {
        "input_ids": prompt + chosen,
        "labels": [IGNORED] * len(prompt) + chosen,
        "rejected_input_ids": prompt + rejected,
        "rejected_labels": [IGNORED] * len(prompt) + rejected,
        "length": 2 * len(prompt) + len(chosen) + len(rejected),
        "supervised": len(chosen) + len(rejected),
        "chosen_supervised": len(chosen),
    }


def labelled(of: list[tuple[list[int], list[int], list[int]]], references: bool = True, sources: int = 2) -> Dataset:
    """Return the rows of labelled answers: the first of each triple's, two in three of them desirable."""
    rows: list[dict[str, Any]] = []
    for number, (prompt, answer, _) in enumerate(of):
        row = {
            "input_ids": prompt + answer,
            "labels": [IGNORED] * len(prompt) + answer,
            "length": len(prompt) + len(answer),
            "supervised": len(answer),
            "source": number % sources,
            "prompt": len(prompt),
            "prompt_hash": hash(tuple(prompt)) % 2**62,
            "desirable": int(number % 3 > 0),
        }
        if references:
            row |= {"reference": -3.0 - number % 5, "reference_mismatched": -20.0 - number % 3}
        rows.append(row)
    return Dataset.from_list(rows)
