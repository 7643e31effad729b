"""Packing loses nothing, overfills nothing, and comes within a quarter of a percent of what is possible."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.data.packing import lower_bound, pack
from zerolora.errors import UserError

Draw = Callable[[np.random.Generator, int, int], np.ndarray]
CASES = st.integers(1, 200).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=120), st.just(capacity))
)


def lognormal(mean: float, sigma: float) -> Draw:
    return lambda random, rows, capacity: random.lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)


def uniform(low: float, high: float) -> Draw:
    return lambda random, rows, capacity: random.uniform(low * capacity, high * capacity, rows)


# The six sets of the published comparison, then others: rows, capacity, lengths.
SETS: dict[str, tuple[int, int, Draw]] = {
    "instructions at 2048": (52_000, 2048, lognormal(150, 0.9)),
    "instructions at 4096": (52_000, 4096, lognormal(150, 0.9)),
    "chat at 4096": (100_000, 4096, lognormal(1045, 0.8)),
    "chat at 8192": (100_000, 8192, lognormal(1045, 0.8)),
    "long at 4096": (50_000, 4096, lognormal(2228, 0.6)),
    "uniform 0.2-0.7": (50_000, 4096, uniform(0.2, 0.7)),
    "uniform 0.1-0.9": (20_000, 4096, uniform(0.1, 0.9)),
    "uniform 0.34-0.5": (20_000, 4096, uniform(0.34, 0.5)),
    "more than a half": (5_000, 4096, uniform(0.51, 0.9)),
    "exponential": (20_000, 2048, lambda random, rows, capacity: random.exponential(300, rows)),
    "all alike": (5_000, 2048, lambda random, rows, capacity: np.full(rows, 700.0)),
    "two kinds": (20_000, 4096, lambda random, rows, capacity: random.choice([300.0, 2900.0], rows)),
    "a huge capacity": (5_000, 131_072, lognormal(9000, 1.0)),
}


@pytest.mark.parametrize("name", SETS)
def test_packed_rows_are_as_full_as_can_be(name: str) -> None:
    rows, capacity, draw = SETS[name]
    lengths = np.clip(draw(np.random.default_rng(0), rows, capacity), 1, capacity).astype(np.int64)
    packed = pack(lengths, capacity)
    assert lower_bound(lengths, capacity) / len(packed) >= 0.9975
    assert np.array_equal(np.sort(np.concatenate([np.array(row) for row in packed])), np.arange(rows))
    assert max(lengths[row].sum() for row in packed) <= capacity


@given(CASES)
def test_each_row_is_packed_once_and_nothing_is_overfilled(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    packed = pack(lengths, capacity)
    assert sorted(row for members in packed for row in members) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in members) <= capacity for members in packed)
    assert len(packed) >= lower_bound(lengths, capacity) >= -(-sum(lengths) // capacity)
    assert all(list(members) == sorted(members) for members in packed)
    assert all(one[0] < other[0] for one, other in pairwise(packed))
    assert pack(np.array(lengths, dtype=np.int32), capacity) == packed == pack(lengths, capacity)
    assert all(type(row) is int for members in packed for row in members)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(12, 16))
def test_the_bound_is_never_above_the_best_packing(lengths: list[int], capacity: int) -> None:
    assert (
        lower_bound(lengths, capacity) <= best(sorted(lengths, reverse=True), capacity) <= len(pack(lengths, capacity))
    )


def best(lengths: list[int], capacity: int) -> int:
    """Return the fewest packed rows, found by trying all of them."""

    def place(number: int, loads: list[int]) -> int:
        if number == len(lengths):
            return len(loads)
        found = place(number + 1, [*loads, lengths[number]])
        for each, load in enumerate(loads):
            if load + lengths[number] <= capacity:
                found = min(found, place(number + 1, [*loads[:each], load + lengths[number], *loads[each + 1 :]]))
        return found

    return place(0, [])


@pytest.mark.parametrize(("lengths", "said"), [([3, 9, 2], "9"), ([3, 0, 2], "0"), ([3, -1, 2], "-1")])
def test_a_row_that_cannot_be_packed_is_named(lengths: list[int], said: str) -> None:
    with pytest.raises(UserError, match=rf"row 1.*{said}"):
        pack(lengths, 8)


def test_no_rows_make_no_packed_rows() -> None:
    assert pack([], 8) == []
    assert lower_bound([], 8) == 0
