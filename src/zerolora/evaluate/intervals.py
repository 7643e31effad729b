"""95 % intervals of metrics over rows: Wilson's for a share, Tango's for the difference of two shares of the same rows,
a percentile bootstrap for any other; McNemar's test."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

Z = 1.959963984540054  # the 97.5th percentile of the normal distribution
LEVEL = 0.95
PERCENTILES = (2.5, 97.5)
MEAN_RESAMPLES = 9999
"""The default of scipy.stats.bootstrap."""
RESAMPLES = 1000
"""For metrics that are not means, which are computed from the rows of each resample."""
AT_ONCE = 1 << 20
"""Counts that a bootstrap holds at once."""
ROUNDS = 60
"""Halvings of an interval's end, which leave no more than the rounding of a float."""
T = TypeVar("T")


def wilson(right: float, rows: int) -> tuple[float, float]:
    """Return the interval of the share right / rows (E. B. Wilson 1927, doi 10.1080/01621459.1927.10502953)."""
    share, scale = right / rows, 1 + Z**2 / rows
    middle = share + Z**2 / (2 * rows)
    half = Z * math.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2))
    # Exactly 0 for no rows, and 1 for all; rounding would miss both.
    return (middle - half) / scale if right else 0.0, (middle + half) / scale if right < rows else 1.0


def tango(gained: int, lost: int, rows: int) -> tuple[float, float]:
    """Return the score interval of (gained - lost) / rows, the difference of two shares of the same rows (T. Tango,
    Statistics in Medicine 17, 1998, 891-908).

    It holds the differences d with |gained - lost - rows d| <= Z sqrt(rows (2 q + d - d²)), where q is the most likely
    share of lost rows if the difference is d.
    """

    def score(difference: float) -> float:
        """Return by how many standard errors the difference of the rows is above this one."""
        middle = (2 * rows - gained + lost) * difference - gained - lost
        root = math.sqrt(max(0.0, middle**2 + 8 * rows * lost * difference * (1 - difference)))
        likely = (root - middle) / (4 * rows)
        variance = rows * (2 * likely + difference * (1 - difference))
        distance = gained - lost - rows * difference
        if variance > 0:
            return distance / math.sqrt(variance)
        return math.copysign(math.inf, distance) if distance else 0.0

    def end(inside: float, outside: float) -> float:
        if abs(score(outside)) <= Z:
            return outside
        for _ in range(ROUNDS):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score(middle)) <= Z else (inside, middle)
        return inside

    share = (gained - lost) / rows
    return end(share, -1.0), end(share, 1.0)


def paired(changes: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """Return the interval of the mean change of the same rows: Tango's for right and wrong, else a bootstrap."""
    gained, lost = int((changes == 1).sum()), int((changes == -1).sum())
    if gained + lost + int((changes == 0).sum()) == len(changes):
        return tango(gained, lost, len(changes))
    return bootstrap_mean(changes)


def bootstrap_mean(values: "np.ndarray[Any, Any] | Sequence[float]", seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of the rows' values (B. Efron, R. Tibshirani, An
    Introduction to the Bootstrap, 1993, section 13.3).

    A resample is a multinomial draw of the counts of the distinct values; AT_ONCE of them are in memory.
    """
    distinct, counts = np.unique(np.asarray(values), return_counts=True)
    rows, draw = int(counts.sum()), np.random.default_rng(seed)
    size = max(1, AT_ONCE // len(distinct))
    sums = [
        draw.multinomial(rows, counts / rows, size=min(size, MEAN_RESAMPLES - start)) @ distinct
        for start in range(0, MEAN_RESAMPLES, size)
    ]
    low, high = np.percentile(np.concatenate(sums) / rows, PERCENTILES)
    return float(low), float(high)


def bootstrap(rows: Sequence[T], metric: Callable[[list[T]], float], seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a metric over RESAMPLES resamples of the rows, drawn by `seed`."""
    drawn = np.random.default_rng(seed).integers(len(rows), size=(RESAMPLES, len(rows)))
    values = [metric([rows[index] for index in indices]) for indices in drawn.tolist()]
    low, high = np.percentile(values, PERCENTILES)
    return float(low), float(high)


def normal_mean(values: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """Return the normal interval of the mean of values that are all distinct, for which `bootstrap_mean` would take
    minutes; of a single value, that value twice."""
    mean = float(values.mean())
    half = Z * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - half, mean + half


def disagree(low: float, high: float, p: float) -> bool:
    """Return whether only one of an interval and McNemar's p says that two models differ, as they may if few rows have
    changed: the interval is approximate, and p is exact and so larger."""
    return (low > 0 or high < 0) != (p < 1 - LEVEL)


def mcnemar(gained: int, lost: int) -> float:
    """Return McNemar's exact two-sided p (Psychometrika 12, 1947): the probability that a fair coin splits the changed
    rows as unevenly; 1 without changes."""
    if gained == lost:
        return 1.0
    # Exact in integers; importing scipy.stats takes a second.
    rows, tail, ways = gained + lost, 0, 1
    for fewer in range(min(gained, lost) + 1):
        tail += ways
        ways = ways * (rows - fewer) // (fewer + 1)
    return 2 * tail / (1 << rows)
