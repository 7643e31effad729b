"""What fine-tuning changed, row by row: the answers of two models to the same rows, compared in pairs.

Rates get Wilson's interval, their difference a bootstrap interval over pairs, and McNemar's exact test says whether as
many rows would turn right, or wrong, by chance.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zerolora.evaluate.intervals import bootstrap_mean, wilson

BUCKETS = 3
"""Groups of rows by length, of about the same size."""
FEWEST = 10
"""Rows that a group by length has at least; with fewer, there are fewer groups."""
Answer = Mapping[str, Any]
"""An entry of answers.json."""
UNMERGED = "unmerged"
"""Of an entry of a merged model, what base and adapter answered; only with evaluate.unmerged."""
TASK_FIELDS = {"question", "expected", "answer", "format", "right", "category", "prompt_tokens"}
"""Of an entry, what is not a score of the task's own."""


def difference(
    before: Mapping[str, Any], after: Mapping[str, Any], answers: tuple[Sequence[Answer], Sequence[Answer]]
) -> dict[str, Any]:
    """Return results/<run>/metrics/difference.json: every metric of the fine-tuned model, those of the base model under
    base_<metric>, and what `compared` finds in the answers of both.

    `before` and `after` are the evaluate.json of both. Raises ValueError if the answers are to other rows.
    """
    if not after.get("enabled", True):
        return dict(after)
    figures = {**after, **{f"base_{name}": value for name, value in before.items() if name != "rows"}}
    return figures | compared(*answers) | with_unmerged(*answers)


def compared(before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, float]:
    """Return a flat table of figures of two models on the same rows; empty if no row was asked.

    answers                           the number of rows that were asked
    accuracy, base_accuracy           shares of right answers, each with _low and _high: Wilson's interval
    difference                        accuracy less base_accuracy, with _low and _high: bootstrap over pairs
    p                                 McNemar's exact two-sided p
    gained, lost                      rows that became right, and wrong
    <group>.accuracy and so on        the same, without the test, for each category and each range of prompt lengths
    format_rate_difference and other  differences of the task's other scores, each with _low and _high

    Raises ValueError if the rows differ.
    """
    if [one["question"] for one in before] != [other["question"] for other in after]:
        raise ValueError("the answers are to other rows")
    if not after:
        return {}
    rows = {"accuracy": (_column(before, "right"), _column(after, "right"))}
    rows["format_rate"] = _column(before, "format"), _column(after, "format")
    scores = [name for name, value in after[0].items() if name not in TASK_FIELDS and isinstance(value, int | float)]
    rows |= {name: (_column(before, name), _column(after, name)) for name in scores}
    one, other = rows.pop("accuracy")
    gained, lost = int((other > one).sum()), int((one > other).sum())
    result: dict[str, float] = {"answers": len(after), **_rates(one, other)}
    result |= {"gained": gained, "lost": lost, "p": mcnemar(gained, lost)}
    for name, (first, second) in rows.items():
        low, high = bootstrap_mean(second - first)
        result |= {f"{name}_difference": float((second - first).mean())}
        result |= {f"{name}_difference_low": low, f"{name}_difference_high": high}
    for group, members in _groups(after).items():
        figures = {"answers": len(members), **_rates(one[members], other[members])}
        result |= {f"{group}.{key}": value for key, value in figures.items()}
    return result


def with_unmerged(before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, Any]:
    """Return a flat table of the other two pairs of base, base and adapter, and merged model, as PAIR_NAME, where PAIR
    is unmerged_over_base or merged_over_unmerged; empty if base and adapter were not asked.

    difference, with _low and _high   accuracy of the first less that of the second: bootstrap over pairs
    p                                 McNemar's exact two-sided p
    gained, lost                      rows that the first alone answers right, and the second alone
    texts                             rows whose answers are not the same text
    rows                              numbers of the rows that were gained or lost, from 0
    """
    if not after or UNMERGED not in after[0]:
        return {}
    between = [answer[UNMERGED] for answer in after]
    result: dict[str, Any] = {}
    for pair, (second, first) in {
        "unmerged_over_base": (before, between),
        "merged_over_unmerged": (between, after),
    }.items():
        change = _column(first, "right") - _column(second, "right")
        low, high = bootstrap_mean(change)
        gained, lost = int((change > 0).sum()), int((change < 0).sum())
        figures = {
            "difference": float(change.mean()),
            "difference_low": low,
            "difference_high": high,
            "p": mcnemar(gained, lost),
            "gained": gained,
            "lost": lost,
            "texts": sum(one["answer"] != other["answer"] for one, other in zip(first, second, strict=True)),
            "rows": np.flatnonzero(change).tolist(),
        }
        result |= {f"{pair}_{name}": value for name, value in figures.items()}
    return result


def changed(before: Sequence[Answer], after: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Return the pairs of answers of which one alone is right: those that were lost first."""
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0]["right"] != pair[1]["right"]]
    return sorted(pairs, key=lambda pair: bool(pair[1]["right"]))


def mcnemar(gained: int, lost: int) -> float:
    """Return McNemar's exact two-sided p: that of as uneven a split of the changed rows by a fair coin
    (Q. McNemar, Psychometrika 12, 1947); 1 if no row has changed."""
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _rates(one: "np.ndarray[Any, Any]", other: "np.ndarray[Any, Any]") -> dict[str, float]:
    result: dict[str, float] = {}
    for name, right in (("base_accuracy", one), ("accuracy", other)):
        low, high = wilson(int(right.sum()), len(right))
        result |= {name: float(right.mean()), f"{name}_low": low, f"{name}_high": high}
    low, high = bootstrap_mean(other - one)
    return result | {"difference": float((other - one).mean()), "difference_low": low, "difference_high": high}


def _column(answers: Iterable[Answer], name: str) -> "np.ndarray[Any, Any]":
    return np.array([float(answer[name]) for answer in answers])


def _groups(answers: Sequence[Answer]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Return the places of the rows of each category, and of each range of prompt lengths, if there are several."""
    groups: dict[str, np.ndarray[Any, Any]] = {}
    categories = [answer.get("category") for answer in answers]
    named = sorted({category for category in categories if category is not None})
    if len(named) > 1:
        groups |= {name: np.array([at for at, own in enumerate(categories) if own == name]) for name in named}
    lengths = np.array([answer["prompt_tokens"] for answer in answers])
    number = min(BUCKETS, len(answers) // FEWEST)
    edges: Any = np.unique(np.quantile(lengths, [part / number for part in range(1, number)])) if number > 1 else []
    ranges = np.searchsorted(edges, lengths, side="left")
    for each in np.unique(ranges) if len(np.unique(ranges)) > 1 else []:
        members = np.flatnonzero(ranges == each)
        groups[f"prompt_tokens_{lengths[members].min()}_{lengths[members].max()}"] = members
    return groups
