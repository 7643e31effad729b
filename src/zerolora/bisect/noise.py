"""Whether a difference of metrics is more than the noise of the seeds.

The good and the bad revision are trained with the same seeds. They differ if the interval of the difference of their
means excludes 0 (report/repeats.py). A probe between them is bad if its mean is on the bad revision's side of the
middle of both means by more than its noise: a one-sided t test with the spread pooled over all groups of seeds, at
MISTAKES divided by the number of probes that a search for one cause takes (Bonferroni), so that the whole search, not
each probe, is wrong in at most MISTAKES.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from zerolora.report.repeats import SeedGroup, difference_of

MISTAKES = 0.05
"""Probability that a search follows a probe to the wrong side."""
UNCLEAR = 0.05
"""Probability that a probe which is as good or as bad as one of both is unclear with the seeds that are needed."""
Side = Literal["good", "bad", "unclear"]


@dataclass(frozen=True)
class RoundedGroup(SeedGroup):
    """Values that are multiples of a step, such as shares of some rows: equal ones may differ by less than it."""

    step: float = 0.0

    @property
    def squares(self) -> float:
        """Sum of the squared distances from the mean, at least that of rounding to the step, of variance step²/12
        (W. F. Sheppard, Proceedings of the London Mathematical Society 29, 1898, 353-380)."""
        return max(super().squares, (len(self.values) - 1) * self.step**2 / 12)


@dataclass
class Noise:
    """The metric of both revisions by seed, and the spread of all that was measured with several seeds."""

    good: Sequence[float]
    bad: Sequence[float]
    probes: int
    """Of a search, over which MISTAKES are divided."""
    others: dict[str, Sequence[float]] = field(default_factory=dict)
    """Values of probes that were trained with several seeds."""
    step: float = 0.0
    """What all values are multiples of; 0 if that is not known."""

    @property
    def loss(self) -> float:
        """By how much the bad mean is worse; negative for a metric of which lower is better, if that is."""
        return fmean(self.good) - fmean(self.bad)

    @property
    def groups(self) -> list[SeedGroup]:
        """All groups of several values."""
        known = [self.good, self.bad, *self.others.values()]
        return [self._group(values) for values in known if len(values) > 1]

    def interval(self, better: Sequence[float], worse: Sequence[float]) -> tuple[float, float, float]:
        """Return by how much the first mean is higher, and the ends of the 95 % interval of that, simultaneous for
        good, bad and these two (Tukey and Kramer)."""
        pair = [self._group(worse), self._group(better)]
        others = [self._group(values) for values in (self.good, self.bad) if values not in (better, worse)]
        return difference_of([*pair, *others], *pair)

    def is_known(self) -> bool:
        """Return whether the seeds differ at all, or the values are known to be rounded."""
        spread, _ = self._spread()
        return spread > 0

    def is_beyond(self) -> bool:
        """Return whether good and bad differ by more than their seeds explain."""
        _, low, high = self.interval(self.good, self.bad)
        return self.is_known() and (low > 0 or high < 0)

    def seeds_needed(self, most: int = 100) -> int | None:
        """Return the seeds, of both revisions and of a probe, with which a probe that is as good or as bad as one of
        them is seldom unclear; None if more than `most`."""
        spread, _ = self._spread()
        known = (
            seeds
            for seeds in range(2, most + 1)
            if self._sure(2 * (seeds - 1)) * spread * _scale(seeds, seeds) <= abs(self.loss) / 2
        )
        return next(known, None)

    def seeds_to_begin(self, most: int) -> int:
        """Return the seeds, at most `most`, with which a probe that is as good or as bad as one of both is seldom
        unclear."""
        spread, free = self._spread()
        sure = self._sure(free) * spread
        known = (seeds for seeds in range(1, most) if sure * _scale(seeds, len(self.good)) <= abs(self.loss) / 2)
        return next(known, most)

    def side(self, values: Sequence[float]) -> Side:
        """Return on which side of the middle the values of a probe are, or that they are too close to it."""
        middle = (fmean(self.good) + fmean(self.bad)) / 2
        worse = (middle - fmean(values)) * math.copysign(1, self.loss)
        if abs(worse) < self._margin(len(values)) or worse == 0:
            return "unclear"
        return "bad" if worse > 0 else "good"

    def _group(self, values: Sequence[float]) -> SeedGroup:
        return RoundedGroup((), tuple(values), self.step)

    def _margin(self, seeds: int) -> float:
        """Return the least distance from the middle at which the mean of some seeds is on one side."""
        spread, free = self._spread()
        return _quantile(MISTAKES / max(1, self.probes), free) * spread * _scale(seeds, len(self.good))

    def _sure(self, free: int) -> float:
        """Return the distance from the middle, in standard errors, at which a probe is unclear in UNCLEAR."""
        return _quantile(MISTAKES / max(1, self.probes), free) + _quantile(UNCLEAR, free)

    def _spread(self) -> tuple[float, int]:
        """Return the pooled standard deviation of the seeds and its degrees of freedom."""
        free = sum(len(group.values) - 1 for group in self.groups)
        return math.sqrt(math.fsum(group.squares for group in self.groups) / free), free


def _scale(seeds: int, of_both: int) -> float:
    """Return the standard error of the distance of a mean of some seeds from the middle of two others, in standard
    deviations."""
    return math.sqrt(1 / seeds + 1 / (2 * of_both))


def step_of(metric: str, results: Sequence[Mapping[str, float]]) -> float:
    """Return the step of a metric that is a share of rows or answers, as its values tell; 0 for others."""
    prefix = metric.rpartition(".")[0]
    for name in ("rows", "answers"):
        counts = [each.get(f"{prefix}.{name}" if prefix else name, 0.0) for each in results]
        shares = [each[metric] * count for each, count in zip(results, counts, strict=True)]
        if min(counts) > 0 and all(
            abs(share - round(share)) < 1e-6 * count for share, count in zip(shares, counts, strict=True)
        ):
            return 1 / min(counts)
    return 0.0


@functools.cache
def _quantile(above: float, free: int) -> float:
    """Return what Student's distribution is above of with a probability."""
    from scipy.stats import t

    return float(t.isf(above, free))
