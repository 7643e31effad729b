"""Rows that begin with the same tokens: grouped, so that training computes their common prefix once.

In causal attention the prefix sees nothing of what follows it, so its states are the same in every row: they are
computed once, and the rest of each row attends to them (attention.py). Losses and gradients are those of whole rows
but for rounding; the prefix gets the sum of the rows' gradients. Generation shares a prefix in the same way
(evaluate/generation.py; arXiv 2309.06180, section 4.4).
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerolora.model.spec import FEWEST, WORTH

if TYPE_CHECKING:
    from zerolora.config.settings import TrainingPlan


class Group(NamedTuple):
    """Rows with a common prefix, in a batch one after another: the prefix, then the rest of each row."""

    prefix: int
    """Tokens of the common prefix, less than any row has; 0 for rows without one."""
    rows: tuple[int, ...]
    """The rows, by number."""


class Branches(NamedTuple):
    """The lengths of a group in a batch."""

    prefix: int
    rests: tuple[int, ...]
    """Tokens of each row after the prefix."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Tokens of the group's parts, in order."""
        return (self.prefix, *self.rests) if self.prefix else self.rests


def allowed(plan: "TrainingPlan", base: Any) -> bool:
    """Return whether the settings of a training allow that a prefix is computed once; `base` is the transformers model,
    with the adapter in it.

    The attention must be this project's, in one rank; compiled layers need batches of few lengths. Whatever is drawn at
    random, such as dropout, would be drawn once for all rows of a prefix, and not for each.
    """
    if plan.attention != "flash" or plan.sequence_parallel > 1 or plan.neftune_alpha or plan.compile:
        return False
    drawn = any("Dropout" in type(module).__name__ and getattr(module, "p", 0) for module in base.modules())
    return not drawn and not any(_is_drawn(*each) for each in base.config.get_text_config().to_dict().items())


def _is_drawn(key: str, value: Any) -> bool:
    """Return whether a key of a model's config sets a share to drop or an amount of noise, as in attention_dropout,
    resid_pdrop, layerdrop, router_jitter_noise; those of a classifier's head do not matter."""
    others = ("classifier", "summary", "seq_classif")
    named = any(word in key for word in ("drop", "jitter", "noise")) and not key.startswith(others)
    return named and isinstance(value, int | float) and value > 0


def worthwhile(rows: Sequence[Any], groups: Sequence[Group]) -> bool:
    """Return whether groups of rows save enough."""
    saved = sum(group.prefix * (len(group.rows) - 1) for group in groups)
    return saved > 0 and saved >= WORTH * sum(map(len, rows))


def grouped(rows: Sequence[Any]) -> list[Group]:
    """Group rows of tokens, lists or arrays, so that the fewest tokens are computed, at most one prefix a row.

    Of rows in lexicographic order, some neighbours are a group: its prefix is the shortest that two neighbours share.
    """
    tokens = [np.asarray(row, dtype=">i4") for row in rows]
    in_order = [row.tobytes() for row in tokens]  # of which the order is that of the tokens
    order = sorted(range(len(rows)), key=lambda number: in_order[number])
    shared = [_common(tokens[one], tokens[other]) for one, other in itertools.pairwise(order)]
    # Tokens saved among the first rows of the order, and the start of the last group that saves them.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        candidates, prefix = [(best[end - 1][0], end - 1)], len(rows[order[end - 1]])
        for start in range(end - 2, -1, -1):
            prefix = min(prefix, shared[start])
            if prefix < FEWEST:
                break
            candidates.append((best[start][0] + (end - 1 - start) * prefix, start))
        best.append(max(candidates))
    groups, end = [], len(order)
    while end:
        start = best[end][1]
        prefix = min(shared[start : end - 1], default=0)
        groups.append(Group(prefix, tuple(sorted(order[start:end]))))
        end = start
    return sorted(groups, key=lambda group: group.rows)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the tokens of a common prefix that leaves at least one token of each row."""
    most = max(0, min(len(one), len(other)) - 1)
    differ = one[:most] != other[:most]
    return int(differ.argmax()) if differ.any() else most
