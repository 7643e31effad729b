"""95 % intervals of metrics over rows: Wilson's for a share, a percentile bootstrap for any other."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

Z = 1.959963984540054  # the 97.5th percentile of the normal distribution
PERCENTILES = (2.5, 97.5)
MEAN_RESAMPLES = 9999
"""Resamples of a mean, as scipy.stats.bootstrap takes by default."""
RESAMPLES = 1000
"""Resamples of a metric that is computed again from the rows of each."""
T = TypeVar("T")


def wilson(right: int, rows: int) -> tuple[float, float]:
    """Return the interval of the share right / rows (E. B. Wilson 1927, doi 10.1080/01621459.1927.10502953)."""
    share, scale = right / rows, 1 + Z**2 / rows
    middle = share + Z**2 / (2 * rows)
    half = Z * math.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2))
    # The ends of no and of all rows are 0 and 1, which rounding would miss.
    return (middle - half) / scale if right else 0.0, (middle + half) / scale if right < rows else 1.0


def bootstrap_mean(values: "np.ndarray[Any, Any] | Sequence[float]", seed: int = 0) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of the rows' values (B. Efron, R. Tibshirani, An
    Introduction to the Bootstrap, 1993, section 13.3), the same for the same numbers.

    Rows are alike if their values are, so that a resample is a draw of how many it has of each. That takes the memory
    of the distinct values, which are three for differences of right and wrong, and not of all rows.
    """
    distinct, counts = np.unique(np.asarray(values), return_counts=True)
    rows = int(counts.sum())
    drawn = np.random.default_rng(seed).multinomial(rows, counts / rows, size=MEAN_RESAMPLES)
    low, high = np.percentile(drawn @ distinct / rows, PERCENTILES)
    return float(low), float(high)


def bootstrap(rows: Sequence[T], metric: Callable[[list[T]], float], seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a metric over RESAMPLES resamples of the rows, drawn by `seed`."""
    drawn = np.random.default_rng(seed).integers(len(rows), size=(RESAMPLES, len(rows)))
    values = [metric([rows[place] for place in places]) for places in drawn.tolist()]
    low, high = np.percentile(values, PERCENTILES)
    return float(low), float(high)
