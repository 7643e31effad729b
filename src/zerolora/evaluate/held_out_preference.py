"""Held-out preference data: the log-probabilities of the data's answers, which of a pair's a model prefers, and the
change of both by fine-tuning.

A log-probability is the sum over an answer's tokens, in nats. Ties of two answers count half.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerolora.evaluate.intervals import mcnemar, normal_mean, paired, wilson

Values = Mapping[str, Any]
"""The figures of one row, for answers.json."""

ACCURACY = "preference_accuracy"
CHOSEN, REJECTED = "chosen_log_probability", "rejected_log_probability"
DESIRABLE, UNDESIRABLE = "desirable_log_probability", "undesirable_log_probability"
ANSWER_TOKENS = "answer_tokens"
"""The number of tokens of the model's own answer, as of the data's answers with the stop token."""
OF_DATA = (
    "longer_answer_rate",
    *(f"{answer}_tokens" for answer in ("chosen", "rejected", "desirable", "undesirable")),
)
"""Figures that are the same for every model."""
FIELDS = frozenset({"rejected", CHOSEN, REJECTED, DESIRABLE, UNDESIRABLE, ANSWER_TOKENS, *OF_DATA})
"""Keys of a row's figures in answers.json."""


def of_pairs(chosen: Sequence[float], rejected: Sequence[float], tokens: tuple[Sequence[int], Sequence[int]]) -> Any:
    """Return the figures of each pair, from the losses of both answers, summed over their `tokens`."""
    return [
        {CHOSEN: -one, REJECTED: -other, "chosen_tokens": first, "rejected_tokens": second}
        for one, other, first, second in zip(chosen, rejected, *tokens, strict=True)
    ]


def of_labelled(losses: Sequence[float], tokens: Sequence[int], desirable: Sequence[int]) -> Any:
    """Return the figures of each labelled answer, from its loss, summed over its `tokens`."""
    names = ("undesirable", "desirable")
    return [
        {f"{names[label]}_log_probability": -loss, f"{names[label]}_tokens": count}
        for loss, count, label in zip(losses, tokens, desirable, strict=True)
    ]


def figures(rows: Sequence[Values]) -> dict[str, float]:
    """Return the metrics of a model on preference data; empty for other rows.

    preference_accuracy     share of pairs whose chosen answer has the higher log-probability
    preference_margin       mean of the chosen answer's log-probability less the rejected one's
      both also _per_token  the same with the mean log-probability of an answer's tokens
    chosen_log_probability, rejected_log_probability
    longer_answer_rate      share of pairs whose chosen answer has more tokens
    chosen_tokens, rejected_tokens
    answer_tokens           of the model's own answers, if it answered

    Of labelled answers, if there are any with this label: desirable_log_probability, with _per_token, and
    desirable_tokens; and the same of undesirable ones. All but shares are means.
    """
    answered = [row for row in rows if ANSWER_TOKENS in row]
    result = {ANSWER_TOKENS: float(_column(answered, ANSWER_TOKENS).mean())} if answered else {}
    if rows and CHOSEN in rows[0]:
        for suffix, margins in {"": _margins(rows), "_per_token": _margins(rows, per_token=True)}.items():
            result[f"preference_accuracy{suffix}"] = float(_wins(margins).mean())
            result[f"preference_margin{suffix}"] = float(margins.mean())
        longer = _column(rows, "chosen_tokens") - _column(rows, "rejected_tokens")
        result["longer_answer_rate"] = float(_wins(longer).mean())
        names = dict.fromkeys((CHOSEN, REJECTED, "chosen_tokens", "rejected_tokens"), rows)
        return result | {name: float(_column(own, name).mean()) for name, own in names.items()}
    for label in ("desirable", "undesirable"):
        own = [row for row in rows if f"{label}_log_probability" in row]
        if own:
            sums, tokens = _column(own, f"{label}_log_probability"), _column(own, f"{label}_tokens")
            result |= {f"{label}_log_probability": float(sums.mean()), f"{label}_tokens": float(tokens.mean())}
            result[f"{label}_log_probability_per_token"] = float((sums / tokens).mean())
    return result


def compared(before: Sequence[Values], after: Sequence[Values]) -> dict[str, float]:
    """Return flat figures of two models on the same preference data, from their entries of answers.json.

    preference_accuracy, base_preference_accuracy   each with _low and _high: Wilson's interval
    preference_accuracy_difference                  with _low and _high: bootstrap over pairs
    preference_accuracy_gained, _lost, _p           pairs that the first, or only the base model, decides for the chosen
                                                    answer; McNemar's exact two-sided p
      all also of preference_accuracy_per_token
    NAME_difference                                 of margins, log-probabilities, and the tokens of the model's own
                                                    answers, with _low and _high: normal interval of the mean

    Empty for other data.
    """
    if not after or not FIELDS & after[0].keys():
        return {}
    result: dict[str, float] = {}
    columns = [name for name in (CHOSEN, REJECTED, DESIRABLE, ANSWER_TOKENS) if name in after[0]]
    changes = {name: _column(after, name) - _column(before, name) for name in columns}
    for suffix in ("", "_per_token") if CHOSEN in after[0] else ():
        margins = [_margins(rows, per_token=bool(suffix)) for rows in (before, after)]
        wins = [_wins(each) for each in margins]
        name = f"preference_accuracy{suffix}"
        for prefix, each in (("base_", wins[0]), ("", wins[1])):
            low, high = wilson(float(each.sum()), len(each))
            result |= {f"{prefix}{name}_low": low, f"{prefix}{name}_high": high}
        change = wins[1] - wins[0]
        gained, lost = int((change > 0).sum()), int((change < 0).sum())
        result |= {f"{name}_gained": gained, f"{name}_lost": lost, f"{name}_p": mcnemar(gained, lost)}
        changes |= {name: change, f"preference_margin{suffix}": margins[1] - margins[0]}
    for name, change in changes.items():
        low, high = (paired if name.startswith("preference_accuracy") else normal_mean)(change)
        figures = {"difference": float(change.mean()), "difference_low": low, "difference_high": high}
        result |= {f"{name}_{figure}": value for figure, value in figures.items()}
    return result


def less_likely(difference: Mapping[str, Any]) -> str:
    """Return "chosen", or "desirable", if fine-tuning made those answers less likely by more than chance, "" otherwise;
    `difference` is difference.json."""
    for label in ("chosen", "desirable"):
        low, high = (difference.get(f"{label}_log_probability_difference_{end}", 0.0) for end in ("low", "high"))
        if low < high < 0:  # a single answer has no deviation, so its ends are equal
            return label
    return ""


def change_in_training(trained: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the rows and the mean change of the chosen answers' log-probability since the start of training, in nats;
    None for an objective without a reference. `trained` is train.json.

    A run that continues from another adapter starts there, so this shows what the held-out comparison with the base
    model does not.
    """
    for rows, name in (("the validation pairs", "chosen_change_validation"), ("the last step", "chosen_change_last")):
        if name in trained:
            return rows, trained[name]
    return None


def _margins(rows: Sequence[Values], per_token: bool = False) -> "np.ndarray[Any, Any]":
    """Return the log-probability of each chosen answer less that of the rejected one."""
    chosen, rejected = _column(rows, CHOSEN), _column(rows, REJECTED)
    if per_token:
        chosen, rejected = chosen / _column(rows, "chosen_tokens"), rejected / _column(rows, "rejected_tokens")
    margins: np.ndarray[Any, Any] = chosen - rejected
    return margins


def _wins(margins: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return 1 for the pairs with a positive margin, and half for ties."""
    wins: np.ndarray[Any, Any] = (1 + np.sign(margins)) / 2
    return wins


def _column(rows: Sequence[Values], name: str) -> "np.ndarray[Any, Any]":
    return np.array([row[name] for row in rows], np.float64)
