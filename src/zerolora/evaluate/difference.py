"""The effect of fine-tuning: the answers of two models to the same rows, compared in pairs.

Rates get Wilson's interval, their difference Tango's and McNemar's exact test; the differences of other scores get a
bootstrap interval over pairs. Preference data have further figures (held_out_preference.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zerolora.evaluate import held_out_preference
from zerolora.evaluate.free_form import FREE_FORM
from zerolora.evaluate.intervals import mcnemar, paired, wilson

BUCKETS = 3
"""Groups of rows by length, of about the same size."""
FEWEST = 10
"""Minimum rows of a group by length."""
Answer = Mapping[str, Any]
"""An entry of answers.json."""
UNMERGED = "unmerged"
"""Key of the answer of base and adapter in an entry of a merged model; only with evaluate.unmerged."""
TASK_FIELDS = {
    "question",
    "expected",
    "answer",
    "format",
    "right",
    "category",
    "prompt_tokens",
    *held_out_preference.FIELDS,
}
"""Keys of an entry that are not scores of the task."""


def difference(
    before: Mapping[str, Any], after: Mapping[str, Any], answers: tuple[Sequence[Answer], Sequence[Answer]]
) -> dict[str, Any]:
    """Return results/<run>/metrics/difference.json: the metrics of the fine-tuned model, those of the base model as
    base_<metric>, and the figures of `compared`, `with_unmerged` and held_out_preference.py.

    before, after: the evaluate.json of both models. Raises ValueError if the answers are to different rows.
    """
    if not after.get("enabled", True):
        return dict(after)
    own = {
        name: value for name, value in before.items() if name not in ("rows", FREE_FORM, *held_out_preference.OF_DATA)
    }
    figures = {**after, **{f"base_{name}": value for name, value in own.items()}}
    return figures | compared(*answers) | with_unmerged(*answers) | held_out_preference.compared(*answers)


def compared(before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, float]:
    """Return flat figures of two models on the same rows; empty without answers.

    answers                           number of answered rows
    accuracy, base_accuracy           shares of right answers, each with _low and _high: Wilson's interval
    difference                        accuracy less base_accuracy, with _low and _high: Tango's interval
    p                                 McNemar's exact two-sided p
    gained, lost                      rows that became right, and wrong
    <group>.accuracy and others       the same without the test, for each category and each range of prompt lengths
    format_rate_difference and other  differences of the task's other scores, each with _low and _high

    Raises ValueError if the rows differ.
    """
    if [one["question"] for one in before] != [other["question"] for other in after]:
        raise ValueError("the answers are to other rows")
    if not after:
        return {}
    scores = [name for name, value in after[0].items() if name not in TASK_FIELDS and isinstance(value, int | float)]
    one, other = _column(before, "right"), _column(after, "right")
    result: dict[str, float] = {"answers": len(after), **_rates(one, other), **_test(other - one)}
    for name, key in {"format_rate": "format", **{name: name for name in scores}}.items():
        figures = _difference(_column(after, key) - _column(before, key))
        result |= {f"{name}_{figure}": value for figure, value in figures.items()}
    for group, members in _groups(after).items():
        figures = {"answers": len(members), **_rates(one[members], other[members])}
        result |= {f"{group}.{key}": value for key, value in figures.items()}
    return result


def with_unmerged(before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, Any]:
    """Return flat figures PAIR_NAME of the pairs unmerged_over_base and merged_over_unmerged, where unmerged is base
    and adapter; empty without answers of these.

    difference, with _low and _high   accuracy of the first less that of the second: Tango's interval
    p                                 McNemar's exact two-sided p
    gained, lost                      rows that only the first, and only the second answers right
    texts                             rows with different answers
    rows                              numbers of the gained and lost rows, from 0
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
        figures = {
            **_difference(change),
            **_test(change),
            "texts": sum(one["answer"] != other["answer"] for one, other in zip(first, second, strict=True)),
            "rows": np.flatnonzero(change).tolist(),
        }
        result |= {f"{pair}_{name}": value for name, value in figures.items()}
    return result


def changed(before: Sequence[Answer], after: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Return the pairs of answers of which only one is right, the lost ones first."""
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0]["right"] != pair[1]["right"]]
    return sorted(pairs, key=lambda pair: bool(pair[1]["right"]))


def _rates(one: "np.ndarray[Any, Any]", other: "np.ndarray[Any, Any]") -> dict[str, float]:
    result: dict[str, float] = {}
    for name, right in (("base_accuracy", one), ("accuracy", other)):
        low, high = wilson(int(right.sum()), len(right))
        result |= {name: float(right.mean()), f"{name}_low": low, f"{name}_high": high}
    return result | _difference(other - one)


def _difference(change: "np.ndarray[Any, Any]") -> dict[str, float]:
    low, high = paired(change)
    return {"difference": float(change.mean()), "difference_low": low, "difference_high": high}


def _test(change: "np.ndarray[Any, Any]") -> dict[str, float]:
    gained, lost = int((change > 0).sum()), int((change < 0).sum())
    return {"gained": gained, "lost": lost, "p": mcnemar(gained, lost)}


def _column(answers: Iterable[Answer], name: str) -> "np.ndarray[Any, Any]":
    return np.array([float(answer[name]) for answer in answers])


def _groups(answers: Sequence[Answer]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Return the indices of the rows of each category, and of each range of prompt lengths, if there are several."""
    groups: dict[str, np.ndarray[Any, Any]] = {}
    categories = [answer.get("category") for answer in answers]
    named = sorted({category for category in categories if category is not None})
    if len(named) > 1:
        groups |= {name: np.flatnonzero([own == name for own in categories]) for name in named}
    lengths = np.array([answer["prompt_tokens"] for answer in answers])
    number = min(BUCKETS, len(answers) // FEWEST)
    edges: Any = np.unique(np.quantile(lengths, [part / number for part in range(1, number)])) if number > 1 else []
    ranges = np.searchsorted(edges, lengths, side="left")
    for each in np.unique(ranges) if len(np.unique(ranges)) > 1 else []:
        members = np.flatnonzero(ranges == each)
        groups[f"prompt_tokens_{lengths[members].min()}_{lengths[members].max()}"] = members
    return groups
