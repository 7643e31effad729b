"""The gate of a run, evaluate.fail_if: a condition on its metrics under which the run fails.

    METRIC COMPARISON NUMBER          accuracy < 0.9
    METRIC COMPARISON base ± NUMBER   accuracy < base - 0.01

METRIC is a key of evaluate.json; `base` is the same metric of the base model, which lacks those of OF_MERGED.
Comparisons: <, <=, >, >=.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GRAMMAR = re.compile(
    r"\s*(?P<metric>[A-Za-z_]\w*)\s*(?P<comparison><=|>=|<|>)\s*"
    r"(?:(?P<base>base)\s*(?:(?P<sign>[+-])\s*(?P<margin>\d+(?:\.\d+)?))?|(?P<number>-?\d+(?:\.\d+)?))\s*"
)
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
OF_MERGED = ("merged_kl", "merged_kl_share", "merged_argmax", "merged_logits")
"""Metrics of a merged model compared with base and adapter (evaluate/merged_logits.py)."""
OF_PAIRS = (
    *("preference_accuracy", "preference_accuracy_per_token", "preference_margin", "preference_margin_per_token"),
    *("chosen_log_probability", "rejected_log_probability", "answer_tokens"),
)
"""Metrics of pairs, besides those of the data alone (evaluate/held_out_preference.py)."""
OF_LABELLED = (
    *("desirable_log_probability", "desirable_log_probability_per_token"),
    *("undesirable_log_probability", "undesirable_log_probability_per_token", "answer_tokens"),
)
"""Metrics of labelled answers."""
OF_TRAINED = ("trained_kl", "trained_logits")
"""Metrics of a merged model compared with the adapter on the quantized base that it was trained on."""
EXAMPLES = "accuracy < base - 0.01 or loss > 1.5"


@dataclass(frozen=True)
class Gate:
    """A condition under which a run fails."""

    metric: str
    comparison: str
    relative: bool
    """Whether `number` is added to the base model's metric."""
    number: float

    def failure(self, figures: Mapping[str, Any]) -> str | None:
        """Return the condition with its numbers if it holds, None otherwise; `figures` are those of difference.json.

        Raises KeyError if the metric is missing.
        """
        value = figures[self.metric]
        base = figures[f"base_{self.metric}"] if self.relative else 0.0
        if not COMPARISONS[self.comparison](value, base + self.number):
            return None
        text = f"{self.metric} {value:.4g} {self.comparison} {base + self.number:.4g}"
        if self.relative:
            text += f" (base {base:.4g} {'-' if self.number < 0 else '+'} {abs(self.number):.4g})"
        if self.metric == "accuracy":
            low, high, p = (figures[name] for name in ("difference_low", "difference_high", "p"))
            text += f"; difference {figures['difference']:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}, p {p:.2g}"
        return text


def parse(text: str) -> Gate:
    """Return the gate described by `text`. Raises ValueError if it is not a condition."""
    match = GRAMMAR.fullmatch(text)
    if not match:
        raise ValueError(f"is not a condition; use METRIC < NUMBER or METRIC < base - NUMBER, as in {EXAMPLES}")
    relative = match["base"] is not None
    number = float(match["margin"] or 0) if relative else float(match["number"])
    return Gate(match["metric"], match["comparison"], relative, -number if match["sign"] == "-" else number)
