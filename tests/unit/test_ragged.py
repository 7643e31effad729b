"""Flat arrays do what lists of lists do."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zerolora.data.ragged import Ragged, bounds

LISTS = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=8)


def lists(ragged: Ragged) -> list[list[int]]:
    return [ragged[number].tolist() for number in range(len(ragged))]


@given(LISTS)
def test_lists_come_back_with_their_lengths_heads_and_sums(given_lists: list[list[int]]) -> None:
    ragged = Ragged.of(given_lists)
    assert lists(ragged) == given_lists
    assert ragged.lengths.tolist() == [len(part) for part in given_lists]
    assert ragged.values[ragged.heads].tolist() == [part[0] for part in given_lists if part]
    assert ragged.totals(ragged.values).tolist() == [sum(part) for part in given_lists]


@given(LISTS, st.data())
def test_some_lists_in_any_order(given_lists: list[list[int]], data: st.DataObject) -> None:
    which = data.draw(st.lists(st.integers(0, len(given_lists) - 1), max_size=9)) if given_lists else []
    assert lists(Ragged.of(given_lists).take(np.array(which, np.int64))) == [given_lists[number] for number in which]


@given(st.lists(st.integers(-5, 5), max_size=9), st.data())
def test_slices(values: list[int], data: st.DataObject) -> None:
    place = st.integers(0, len(values))
    pairs = data.draw(st.lists(st.tuples(place, place).map(sorted), max_size=6))
    starts, ends = np.array(pairs, np.int64).reshape(-1, 2).T
    assert lists(Ragged.of([values]).slices(starts, ends)) == [values[start:end] for start, end in pairs]


@given(st.lists(LISTS, max_size=5))
def test_lists_that_follow_each_other_are_joined(groups: list[list[list[int]]]) -> None:
    flat = [part for group in groups for part in group]
    assert lists(Ragged.of(flat).joined(map(len, groups))) == [
        [value for part in group for value in part] for group in groups
    ]


def test_bounds() -> None:
    assert bounds([2, 0, 3]).tolist() == bounds(np.array([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert bounds([]).tolist() == [0]
