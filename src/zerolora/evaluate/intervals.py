"""95 % intervals of metrics over rows: Wilson's for a share, a percentile bootstrap for any other."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

Z = 1.959963984540054  # the 97.5th percentile of the normal distribution
RESAMPLES = 1000
T = TypeVar("T")


def wilson(right: int, rows: int) -> tuple[float, float]:
    """Return the interval of the share right / rows (E. B. Wilson 1927, doi 10.1080/01621459.1927.10502953)."""
    share, scale = right / rows, 1 + Z**2 / rows
    middle = share + Z**2 / (2 * rows)
    half = Z * math.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def bootstrap(rows: Sequence[T], metric: Callable[[list[T]], float], seed: int) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile of a metric over RESAMPLES resamples of the rows, drawn by `seed`."""
    drawn = np.random.default_rng(seed).integers(len(rows), size=(RESAMPLES, len(rows)))
    values = [metric([rows[place] for place in places]) for places in drawn.tolist()]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
