"""Counts the training rows whose prompt also occurs in an evaluation task.

Prompts are compared as text, decoded from the prepared rows: what is not supervised, or the whole row if all is.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zerolora.data.near_prompts import near
from zerolora.data.normal_form import normal_form
from zerolora.data.prepared_rows import IGNORED, open_table
from zerolora.data.ragged import Ragged
from zerolora.data.task_prompts import tokens_of
from zerolora.log import LOGGER

LEAKED = "leaked_prompts"
NEAR = "leaked_near_prompts"
BATCH = 1000  # rows


def leaks(data: Path, tokenizer: Any, questions: Sequence[str], prompts: Sequence[str], task: str) -> dict[str, int]:
    """Return the number of training rows of the prepared `data` with the prompt of a task's row, apart from case, white
    space and punctuation (leaked_prompts), and of those with nearly a task's question (leaked_near_prompts).

    questions: of the task's rows. prompts: the same as the tokenizer's chat template writes them. task: its name, for
    the log.
    """
    table = open_table(data, "train")
    rows, same = len(table), {_hash(text) for text in questions}
    same |= {_hash(tokenizer.decode(tokens_of(tokenizer, text), skip_special_tokens=True)) for text in prompts}
    hashes = np.zeros(rows, np.uint64)
    for numbers, texts in _texts(table, tokenizer, np.arange(rows)):
        hashes[numbers] = [_hash(text) for text in texts]
    equal = np.isin(hashes, np.array([*same], np.uint64))
    _, first = np.unique(hashes, return_index=True)
    # A prompt that occurs several times is looked at once.
    distinct = np.sort(first[~equal[first]])

    def texts_of(wanted: np.ndarray) -> Iterator[tuple[np.ndarray, list[str]]]:
        yield from _texts(table, tokenizer, wanted[wanted < rows])
        if len(asked := wanted[wanted >= rows]):
            yield asked, [questions[number - rows] for number in asked.tolist()]

    asked = rows + np.arange(len(questions))
    ranks = np.concatenate([np.zeros(len(distinct), np.int8), np.full(len(asked), 2, np.int8)])
    nearly, _ = near(np.concatenate([distinct, asked]), ranks, texts_of)
    found = {LEAKED: int(equal.sum()), NEAR: int(np.isin(hashes, hashes[nearly]).sum())}
    if any(found.values()):
        LOGGER.warning(
            f"{data}: {found[LEAKED]:,} of {rows:,} training rows have the prompt of a row of {task}, and "
            f"{found[NEAR]:,} nearly one; its figures are higher than on new rows"
        )
    return found


def _texts(table: Any, tokenizer: Any, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Yield some rows in parts, each with their prompts."""
    for start in range(0, len(wanted), BATCH):
        part = wanted[start : start + BATCH]
        taken = table.select(["input_ids", "labels"]).take(part).combine_chunks()
        ids, labels = (taken[name].combine_chunks() for name in ("input_ids", "labels"))
        values, offsets = ids.flatten().to_numpy(), ids.offsets.to_numpy() - ids.offsets[0].as_py()
        unsupervised = labels.flatten().to_numpy() == IGNORED
        tokens = Ragged(values, offsets)
        # The first token of a row is never supervised.
        whole = tokens.totals(unsupervised) <= 1
        used = unsupervised | np.repeat(whole, tokens.lengths)
        texts = (values[begin:end][used[begin:end]].tolist() for begin, end in pairwise(offsets))
        yield part, tokenizer.batch_decode([*texts], skip_special_tokens=True)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(normal_form(text).encode(), digest_size=8).digest())
