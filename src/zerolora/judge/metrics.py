"""The metrics of a judgement: scores, wins and ties, with bootstrap intervals over the questions."""

import re
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerolora.judge.prompts import BASE, MODELS, PAIR, SINGLE, TUNED

RATING = re.compile(r"\[\[([0-9]+(?:\.[0-9]+)?)\]\]")
WINNER = re.compile(r"\[\[([ABC])\]\]")
LOWEST, HIGHEST = 1.0, 10.0
TIE = "tie"
RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)
"""Percentiles of a 95 % interval."""
OUTCOMES = {"win_rate": TUNED, "loss_rate": BASE, "tie_rate": TIE}

Values = dict[str, list[float]]
"""By question: one value for each turn with a readable verdict."""


def rating(text: str) -> float | None:
    """Return the rating in a text, as in [[5]]; None without one, with two different ones, or out of range."""
    result = {float(each) for each in RATING.findall(text)}
    value = result.pop() if len(result) == 1 else None
    return value if value is not None and LOWEST <= value <= HIGHEST else None


def winner(text: str, models: tuple[str, ...]) -> str | None:
    """Return the better of two models for [[A]] or [[B]], TIE for [[C]]; None without exactly one of these."""
    result = set(WINNER.findall(text))
    return {"A": models[0], "B": models[1], "C": TIE}[result.pop()] if len(result) == 1 else None


def outcome(one: str | None, other: str | None) -> str | None:
    """Return the winner of a comparison: the model that wins in both orders, otherwise TIE (arXiv 2306.05685, section
    3.4). None if one of the verdicts could not be read."""
    if one is None or other is None:
        return None
    return one if one == other else TIE


def read(record: dict[str, Any]) -> float | str | None:
    """Return the verdict of a record: a rating, a model or TIE; None if it cannot be read."""
    if record["kind"] == SINGLE:
        return rating(record["answer"])
    first = record["role"].removesuffix("_first")
    return winner(record["answer"], (first, TUNED if first == BASE else BASE))


def metrics(records: list[dict[str, Any]], seed: int) -> dict[str, float | int | None]:
    """Return flat metrics of all records; null without a verdict that could be read.

    `score_MODEL` is the mean rating, `score_difference` tuned less base where both were rated. `win_rate`, `loss_rate`
    and `tie_rate` are shares of the comparisons, one for each question and turn, with readable verdicts in both orders;
    a difference between the orders is a tie. `_low` and `_high` bound 95 % of bootstrap resamples of the questions
    (percentile method; Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
    """
    result: dict[str, float | int | None] = {}
    for name, values in _values(records).items():
        result[name] = _mean(values)
        result[f"{name}_low"], result[f"{name}_high"] = interval(values, seed)
    groups = {f"turn_{turn}": [each for each in records if each["turn"] == turn] for turn in (1, 2)}
    for category in sorted({record["category"] for record in records}):
        groups[f"category_{category}"] = [each for each in records if each["category"] == category]
    for group, members in groups.items():
        result |= {f"{name}_{group}": _mean(values) for name, values in _values(members).items()}
    unread = [record for record in records if read(record) is None]
    return {
        **result,
        "questions": len({record["question_id"] for record in records}),
        "requests": len(records),
        "unparsable": len(unread),
        "unparsable_single": sum(record["kind"] == SINGLE for record in unread),
        "unparsable_pair": sum(record["kind"] == PAIR for record in unread),
        "prompt_tokens": sum(record["prompt_tokens"] for record in records),
        "completion_tokens": sum(record["completion_tokens"] for record in records),
        "requests_without_usage": sum(not record["tokens_counted_by_endpoint"] for record in records),
    }


def interval(values: Values, seed: int) -> tuple[float | None, float | None]:
    """Return the bounds of the mean over bootstrap resamples of the questions, None without values.

    Both turns of a question are drawn together, since they are not independent.
    """
    if not any(values.values()):
        return None, None
    sums: NDArray[np.float64] = np.array([sum(each) for each in values.values()])
    counts: NDArray[np.float64] = np.array([len(each) for each in values.values()], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))
    number = counts[drawn].sum(1)
    means = sums[drawn].sum(1)[number > 0] / number[number > 0]
    low, high = np.percentile(means, INTERVAL)
    return float(low), float(high)


def _values(records: list[dict[str, Any]]) -> dict[str, Values]:
    """Return the values of each metric by question."""
    verdicts = {(each["question_id"], each["turn"], each["kind"], each["role"]): read(each) for each in records}
    names = [*(f"score_{model}" for model in MODELS), "score_difference", *OUTCOMES]
    result: dict[str, Values] = {name: defaultdict(list) for name in names}
    for question, turn in sorted({(each["question_id"], each["turn"]) for each in records}):
        base, tuned = (verdicts.get((question, turn, SINGLE, model)) for model in MODELS)
        orders = [verdicts.get((question, turn, PAIR, f"{model}_first")) for model in MODELS]
        better = outcome(*(each if isinstance(each, str) else None for each in orders))
        values = {f"score_{BASE}": base, f"score_{TUNED}": tuned}
        if isinstance(base, float) and isinstance(tuned, float):
            values["score_difference"] = tuned - base
        if better is not None:
            values |= {name: float(better == model) for name, model in OUTCOMES.items()}
        for name, value in values.items():
            if isinstance(value, float):
                result[name][question].append(value)
    return result


def _mean(values: Values) -> float | None:
    flat = [value for each in values.values() for value in each]
    return sum(flat) / len(flat) if flat else None
