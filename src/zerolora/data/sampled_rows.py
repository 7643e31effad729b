"""Rows that `select` makes of sampled answers: their column of provenance, which no form reads, and their prompts.

A row of sampled answers is read as any other row. Its column SAMPLED says which prompt the answers were sampled from,
by the prompt's tokens, so that no answer follows another prompt in training than the one that it is an answer to.
"""

from collections.abc import Mapping
from typing import Any

from zerolora.data.example import SAMPLED, BadRow
from zerolora.types import RowKind

PROMPT = "prompt_tokens"
"""Its key with the hash of the prompt's tokens."""
ROWS = "rows.jsonl"
KINDS: dict[str, RowKind] = {
    **dict.fromkeys(("right", "best", "all"), "texts"),
    "pairs": "pairs",
    "labelled": "labelled",
}
"""What the rows of a selection hold, by what it keeps."""
FORMATS: dict[RowKind, str] = {"texts": "prompt", "pairs": "preference", "labelled": "labelled"}
"""The form of such rows."""


def prompt_hash(value: Any) -> str | None:
    """Return the hash of the prompt that a row's answers were sampled from; None for any other row. Raises BadRow for a
    column that `select` did not write."""
    if not isinstance(value, Mapping) or SAMPLED not in value:
        return None
    column = value[SAMPLED]
    if not isinstance(column, Mapping) or not isinstance(column.get(PROMPT), str):
        raise BadRow(f"{SAMPLED} is not as the stage select writes it, which has {PROMPT}; remove the column")
    return str(column[PROMPT])


NOT_SAMPLED_FROM = BadRow(
    "its answer was sampled from a prompt with other tokens than it has here; prepare the row with the model, template "
    "and system prompt of the data set that was sampled"
)
CUT_SAMPLED = BadRow(
    "is too long and would be cut, but its answer was sampled from the whole prompt; raise the limit that it exceeds, "
    "or set too_long: drop"
)
