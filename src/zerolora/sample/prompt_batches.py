"""The prompts of a sample, in batches that do not depend on what is done already.

On most devices, the last bits of a model's logits depend on the shape of its batch. So the batches follow from the
prompts and from `batch` alone: those of one number of the answer are of prompts of similar length, and a batch of which
an answer is missing is computed as a whole, whether a job was killed, ranks share the work, or `n` was raised.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerolora.data.prepared_rows import PROMPTS, open_table
from zerolora.data.sampled_prompts import prompt_key
from zerolora.errors import UserError
from zerolora.files import MANIFEST
from zerolora.memory.inference import AUTO_ROWS
from zerolora.model import foreign
from zerolora.model.longest_row import longest_row


class AskedPrompt(NamedTuple):
    """A prompt to sample from."""

    key: bytes
    """A hash of its tokens, by which its answers are known."""
    tokens: list[int]


class Batch(NamedTuple):
    """Answers that are computed together: the prompts' numbers, and the answers' number."""

    prompts: list[int]
    sample: int


Done = Collection[tuple[str, int]]
"""The key of a prompt in hexadecimal, and the number of an answer, of each that is there."""


def read_prompts(data: Path) -> list[AskedPrompt]:
    """Return the prompts of the prepared rows in `data`. Raises UserError if there are none."""
    table = open_table(data, PROMPTS)
    if not table.num_rows:
        raise UserError(
            f"{data / PROMPTS}.arrow: is empty, since its data set was prepared without a sample of it; name it in "
            "samples and run `zerolora stage prepare` again"
        )
    rows = zip(table["input_ids"], table["prompt"].to_pylist(), strict=True)
    tokens = [row.values.to_numpy()[:length] for row, length in rows]
    return [AskedPrompt(prompt_key(each), np.asarray(each).tolist()) for each in tokens]


def check_room(prompt: int, answer: int, weights: Path, what: str) -> None:
    """Raise UserError if a prompt and an answer of these tokens are longer than the rows that a model takes."""
    most = longest_row(weights)
    if most is not None and most < prompt + answer:
        raise UserError(
            f"{what}.max_new_tokens: {answer:,}, and with the longest prompt, of {prompt:,} tokens, this is more than "
            f"the {most:,} that {weights} takes; use {max(most - prompt, 0):,} or less, or a smaller max_prompt_length "
            "in prepare"
        )


def batches_of(prompts: Sequence[AskedPrompt], n: int, batch: int | str) -> list[Batch]:
    """Return the batches of all answers: the longest prompts first, which take the most memory, and the batches of
    some prompts one after the other."""
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].tokens), prompts[number].key))
    size = AUTO_ROWS if isinstance(batch, str) else batch
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    return [Batch(chunk, sample) for chunk in chunks for sample in range(n)]


def missing(batches: Sequence[Batch], prompts: Sequence[AskedPrompt], done: Done) -> Iterator[Batch]:
    """Yield the batches of which an answer is missing."""
    for batch in batches:
        if any((prompts[number].key.hex(), batch.sample) not in done for number in batch.prompts):
            yield batch


def format_of(data: Path) -> dict[str, object]:
    """Return what of a data set decides an answer, beside the prompt."""
    names = ("stop_tokens", "pad_token", "added_tokens")
    manifest = foreign.manifest(data / MANIFEST, "zerolora stage prepare", *names)
    return {name: manifest[name] for name in names}
