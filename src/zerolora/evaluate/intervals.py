"""95 % intervals of metrics over rows: Wilson's for a share, a percentile bootstrap for any other; McNemar's test."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

Z = 1.959963984540054  # the 97.5th percentile of the normal distribution
PERCENTILES = (2.5, 97.5)
MEAN_RESAMPLES = 9999
"""The default of scipy.stats.bootstrap."""
RESAMPLES = 1000
"""For metrics that are not means, which are computed from the rows of each resample."""
T = TypeVar("T")


def wilson(right: float, rows: int) -> tuple[float, float]:
    """Return the interval of the share right / rows (E. B. Wilson 1927, doi 10.1080/01621459.1927.10502953)."""
    share, scale = right / rows, 1 + Z**2 / rows
    middle = share + Z**2 / (2 * rows)
    half = Z * math.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2))
    # Exactly 0 for no rows, and 1 for all; rounding would miss both.
    return (middle - half) / scale if right else 0.0, (middle + half) / scale if right < rows else 1.0


def bootstrap_mean(values: "np.ndarray[Any, Any] | Sequence[float]", seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of the rows' values (B. Efron, R. Tibshirani, An
    Introduction to the Bootstrap, 1993, section 13.3).

    A resample is a multinomial draw of the counts of the distinct values, so memory depends on their number, which is 3
    for differences of right and wrong, and not on the number of rows.
    """
    distinct, counts = np.unique(np.asarray(values), return_counts=True)
    rows = int(counts.sum())
    drawn = np.random.default_rng(seed).multinomial(rows, counts / rows, size=MEAN_RESAMPLES)
    low, high = np.percentile(drawn @ distinct / rows, PERCENTILES)
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
