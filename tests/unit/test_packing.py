"""The packer: laws for any rows, its distance from the lower bound, and refusals."""

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import SETS
from packing import lengths as drawn

from zerolora.data.packing import pack
from zerolora.data.packing_bound import lower_bound
from zerolora.errors import UserError

NEEDED = 0.9975  # of what is possible
PROMISED = list(SETS)[:6]


@st.composite
def problems(draw: st.DrawFn, capacities: int = 5000, rows: int = 60) -> tuple[list[int], int]:
    """Draw rows that fit a capacity, from a part of the range of lengths or all of it."""
    capacity = draw(st.integers(1, capacities))
    low = draw(st.integers(1, capacity))
    high = draw(st.integers(low, capacity))
    return draw(st.lists(st.integers(low, high), max_size=rows)), capacity


def check(packed: list[list[int]], lengths: list[int], capacity: int) -> None:
    """Check: every row once, none over capacity, all in order."""
    assert sorted(row for rows in packed for row in rows) == list(range(len(lengths)))
    assert max((sum(lengths[row] for row in rows) for rows in packed), default=0) <= capacity
    assert all(rows == sorted(rows) for rows in packed)
    assert packed == sorted(packed)


def optimum(lengths: list[int], capacity: int) -> int:
    """Return the fewest packed rows, by dynamic programming over subsets: (fewest, least tokens in the last one)."""
    best = [(1, 0)] + [(len(lengths) + 1, 0)] * ((1 << len(lengths)) - 1)
    for subset, (count, used) in enumerate(best):
        for row, length in enumerate(lengths):
            if not subset >> row & 1:
                one_more = (count, used + length) if used + length <= capacity else (count + 1, length)
                best[subset | 1 << row] = min(best[subset | 1 << row], one_more)
    return best[-1][0] if lengths else 0


@given(problems())
def test_rows_are_packed_once_within_capacity(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    packed = pack(lengths, capacity)
    check(packed, lengths, capacity)
    assert lower_bound(lengths, capacity) <= len(packed)
    assert lower_bound(lengths, capacity) >= -(-sum(lengths) // capacity)
    assert packed == pack(lengths, capacity)
    assert packed == pack(np.array(lengths, dtype=np.int32), capacity)


@given(problems(), st.randoms())
def test_order_of_rows_does_not_change_the_count(problem: tuple[list[int], int], order: random.Random) -> None:
    lengths, capacity = problem
    shuffled = order.sample(lengths, len(lengths))
    assert len(pack(shuffled, capacity)) == len(pack(lengths, capacity))
    assert lower_bound(shuffled, capacity) == lower_bound(lengths, capacity)


@given(problems(capacities=40, rows=8))
def test_bound_is_at_most_the_optimum(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    assert lower_bound(lengths, capacity) <= optimum(lengths, capacity) <= len(pack(lengths, capacity))


def test_few_rows_are_packed_optimally() -> None:
    draw = random.Random(0)  # noqa: S311 - data, not secrets
    for _ in range(200):
        capacity = draw.randint(5, 60)
        lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 9))]
        assert lower_bound(lengths, capacity) == optimum(lengths, capacity) == len(pack(lengths, capacity))


@given(st.integers(2, 300), st.integers(1, 8), st.integers(0, 2**32))
def test_bound_is_exact_for_cut_full_rows(packed_rows: int, cuts: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    edges = np.sort(draw.integers(0, 513, (packed_rows, cuts)), axis=1)
    parts = np.diff(edges, axis=1, prepend=0, append=512).ravel()
    lengths = draw.permutation(parts[parts > 0])
    assert lower_bound(lengths, 512) == packed_rows


@pytest.mark.parametrize(
    ("lengths", "capacity", "fewest"),
    [
        ([51] * 10, 100, 10),
        ([34] * 10, 100, 5),
        ([26] * 10, 100, 4),
        ([80, 80, 30, 30, 30, 30], 100, 4),
        ([60, 45, 45, 45, 45, 60, 60, 60], 100, 6),
        ([4, 4, 4], 7, 3),
    ],
)
def test_bound_counts_unfillable_space(lengths: list[int], capacity: int, fewest: int) -> None:
    assert -(-sum(lengths) // capacity) < fewest
    assert lower_bound(lengths, capacity) == fewest == len(pack(lengths, capacity))


@pytest.mark.parametrize("name", PROMISED)
def test_packed_rows_are_full(name: str) -> None:
    lengths, capacity = drawn(name)
    packed = pack(lengths, capacity)
    check(packed, lengths.tolist(), capacity)
    assert lengths.sum() / (len(packed) * capacity) >= NEEDED


@pytest.mark.parametrize("rows", [100, 1000, 20_000])
@pytest.mark.parametrize("name", SETS)
def test_packing_is_near_the_bound(name: str, rows: int) -> None:
    lengths, capacity = drawn(name, rows)
    bound = lower_bound(lengths, capacity)
    # Of few packed rows, one too many is more than a quarter of a percent.
    assert len(pack(lengths, capacity)) <= max(bound + 2, bound / NEEDED)


def test_rows_of_one_length_stay_in_order() -> None:
    assert pack([5] * 6, 10) == [[0, 1], [2, 3], [4, 5]]
    assert pack([3, 7, 3, 7], 10) == [[0, 1], [2, 3]]
    assert pack([10, 1, 9], 10) == [[0], [1, 2]]


def test_packing_does_not_depend_on_hash_seed() -> None:
    lengths, capacity = drawn("uniform 0.2-0.7", 1000)
    code = f"import zerolora.data.packing as p; print(p.pack({lengths.tolist()}, {capacity}))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
        assert printed.stdout.decode().strip() == str(pack(lengths, capacity))


def test_no_rows_make_no_packed_rows() -> None:
    assert pack([], 100) == pack(np.array([], dtype=np.int32), 100) == []
    assert lower_bound([], 100) == 0


@pytest.mark.parametrize("function", [pack, lower_bound])
@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([10, 101, 200], ["row 1 has 101 tokens", "capacity is 100", "raise pack.capacity"]),
        (np.array([10, 20, 101], dtype=np.uint16), ["row 2 has 101 tokens", "capacity is 100", "raise pack.capacity"]),
        ([10, 0], ["row 1 has 0 tokens", "capacity is 100", "leave it out"]),
        (np.array([-3], dtype=np.int64), ["row 0 has -3 tokens", "capacity is 100", "leave it out"]),
    ],
)
def test_unpackable_row_is_named(function: Any, lengths: Any, said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        function(lengths, 100)
    assert all(words in str(error.value) for words in said)
