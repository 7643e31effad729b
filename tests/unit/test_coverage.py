"""How often the 95 % intervals hold the truth: exactly where the data are counts, else over drawn data.

The bootstrap takes two seconds: each has 9,999 resamples.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from zerolora.evaluate.intervals import bootstrap_mean, mcnemar, normal_mean, tango, wilson
from zerolora.report.comparison_columns import ACCURACY
from zerolora.report.repeats import RepeatedFigure, SeedGroup

Ends = tuple[float, float]
SETS = 400
"""Drawn data sets: a coverage of 0.95 is then measured within 0.02."""


@pytest.mark.parametrize("rows", [20, 100, 400])
def test_wilson_holds_the_share(rows: int) -> None:
    """On average; for single shares it is known to vary (Brown, Cai, DasGupta, Statistical Science 16, 2001)."""
    ends = [wilson(right, rows) for right in range(rows + 1)]
    shares = np.linspace(0.02, 0.98, 97)
    coverage = [
        sum(stats.binom.pmf(right, rows, share) for right, (low, high) in enumerate(ends) if low <= share <= high)
        for share in shares
    ]
    assert 0.945 < np.mean(coverage) < 0.965
    assert min(coverage) > (0.83 if rows == 20 else 0.87)


def test_tango_holds_the_difference_of_the_same_rows() -> None:
    """Exactly, over all splits of 40 rows into gained, lost and unchanged ones."""
    rows = 40
    tables = [(gained, lost) for gained in range(rows + 1) for lost in range(rows + 1 - gained)]
    ends = [tango(*table, rows) for table in tables]
    for gained, lost in [(0.05, 0.05), (0.3, 0.1), (0.5, 0.02), (0.02, 0.2), (0.2, 0.2)]:
        chances = stats.multinomial.pmf(
            [(*table, rows - sum(table)) for table in tables], rows, [gained, lost, 1 - gained - lost]
        )
        held = [low <= gained - lost <= high for low, high in ends]
        assert 0.925 < float(chances @ np.array(held)) < 0.985, (gained, lost)


def test_mcnemar_finds_a_difference_by_chance_in_at_most_a_twentieth() -> None:
    for rows in (5, 20, 100):
        chances = stats.binom.pmf(np.arange(rows + 1), rows, 0.5)
        rejected = [mcnemar(gained, rows - gained) < 0.05 for gained in range(rows + 1)]
        assert float(chances @ np.array(rejected)) <= 0.05


def coverage(draw: Callable[[np.random.Generator], np.ndarray], truth: float, ends: Callable[..., Ends]) -> float:
    random = np.random.default_rng(0)
    intervals = [ends(draw(random)) for _ in range(SETS)]
    return sum(low <= truth <= high for low, high in intervals) / SETS


def test_bootstrap_holds_the_mean_of_scores() -> None:
    """Scores as of BLEU or F1 answers: many 0, some 1, the rest between; of 150 rows."""
    values, chances = np.array([0.0, 0.25, 0.5, 0.75, 1.0]), [0.5, 0.1, 0.1, 0.1, 0.2]
    actual = coverage(lambda random: random.choice(values, 150, p=chances), float(values @ chances), bootstrap_mean)
    assert 0.92 < actual < 0.975


def test_normal_interval_holds_the_mean_of_distinct_values() -> None:
    """Skewed, as differences of log-probabilities are; of 200 rows."""
    actual = coverage(lambda random: random.gamma(2.0, 1.0, 200), 2.0, normal_mean)
    assert 0.92 < actual < 0.975


def groups(random: np.random.Generator, sizes: tuple[int, ...]) -> tuple[SeedGroup, ...]:
    """Groups of runs with the same mean."""
    return tuple(
        SeedGroup(tuple(f"run{number}{each}" for each in range(size)), tuple(random.normal(0.8, 0.01, size)))
        for number, size in enumerate(sizes)
    )


@pytest.mark.parametrize("seeds", [2, 5])
def test_students_interval_holds_the_mean_of_seeds(seeds: int) -> None:
    random = np.random.default_rng(1)
    intervals = [groups(random, (seeds,))[0].interval() for _ in range(4 * SETS)]
    assert 0.935 < sum(low <= 0.8 <= high for low, high in intervals) / len(intervals) < 0.965


@pytest.mark.parametrize("sizes", [(3, 3), (3, 3, 3, 3), (5, 2, 1)])
def test_equal_groups_are_told_apart_in_a_twentieth(sizes: tuple[int, ...]) -> None:
    """However many there are: in at most a twentieth of the tables any two groups of one mean are told apart."""
    random, told = np.random.default_rng(2), 0
    for _ in range(4 * SETS):
        figure = RepeatedFigure(ACCURACY, groups(random, sizes))
        ends = itertools.starmap(figure.difference, itertools.combinations(figure.groups, 2))
        told += any(low > 0 or high < 0 for _, low, high in ends)
    assert told / (4 * SETS) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / (4 * SETS))
    assert told
