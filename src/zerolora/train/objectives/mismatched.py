"""The mismatched sequences of labelled rows: the prompt of a row with the answer of another prompt's row.

KTO estimates from them how far the model has moved (arXiv 2402.01306, section 4.1). They follow from a split alone, so
stage `reference` computes them once, and neither batches nor ranks change them.
"""

from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def partners(prompt_hashes: "np.ndarray") -> "np.ndarray":
    """Return for each row the number of the one whose answer it gets: the last before it, the first row coming after
    the last, that has another prompt. Raises UserError if all have the same."""
    import numpy as np

    count = len(prompt_hashes)
    first = np.flatnonzero(prompt_hashes != np.roll(prompt_hashes, 1))  # of each run of rows with the same prompt
    if count and not len(first):
        raise UserError(
            f"all {count} labelled rows of a split have the same prompt, but kto compares answers with those of other "
            "prompts; add rows, or choose another train.objective"
        )
    return (first[np.searchsorted(first, np.arange(count), side="right") - 1] - 1) % max(1, count)


def mismatched(row: dict[str, Any], other: dict[str, Any], longest: int) -> "dict[str, np.ndarray]":
    """Return input_ids and labels of the prompt of a row with the answer of another, cut after `longest` tokens, those
    of the split's longest row: neither the model's positions nor its memory are needed for more."""
    import numpy as np

    prompt, of_other = row["prompt"], other["prompt"]
    return {
        name: np.concatenate([row[name][:prompt], other[name][of_other:]])[:longest].astype(np.int32)
        for name in ("input_ids", "labels")
    }
