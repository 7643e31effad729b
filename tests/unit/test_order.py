"""The order of packed rows: fixed by seed and global batch, balanced within a batch and between ranks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.train.order import WINDOW, assign, global_batches, spread

WORKS = st.lists(st.integers(1, 10**6), min_size=1, max_size=300).map(lambda values: np.array(values, dtype=float))


@given(WORKS, st.integers(0, 99), st.integers(1, 16), st.integers(1, 3))
def test_epochs_see_every_row_once_except_a_remainder(
    work: np.ndarray, seed: int, global_batch: int, epochs: int
) -> None:
    order = global_batches(work, seed, global_batch, epochs)
    assert order.shape == (len(work) * epochs // global_batch, global_batch)
    seen = np.bincount(order.ravel(), minlength=len(work))
    assert seen.max(initial=0) <= epochs
    assert epochs * len(work) - seen.sum() < global_batch
    assert np.array_equal(order, global_batches(work, seed, global_batch, epochs))
    # A run with one more epoch starts with it.
    part = global_batches(work, seed, global_batch, epochs - 0.25)
    assert len(part) == int(len(work) * (epochs - 0.25) // global_batch) and np.array_equal(part, order[: len(part)])
    longer = global_batches(work, seed, global_batch, epochs + 1)
    assert np.array_equal(order, longer[: len(order)])


@given(st.integers(1, 80), st.integers(1, 16), st.integers(0, 99))
def test_epochs_do_not_overlap(batches: int, global_batch: int, seed: int) -> None:
    rows = batches * global_batch
    order = global_batches(np.arange(rows), seed, global_batch, 3)
    for epoch in order.reshape(3, rows):
        assert sorted(epoch) == list(range(rows))


def test_order_depends_on_seed_and_epoch() -> None:
    work = np.arange(100.0)
    assert not np.array_equal(global_batches(work, 1, 4, 1), global_batches(work, 2, 4, 1))
    epochs = global_batches(work, 1, 4, 2)
    assert not np.array_equal(epochs[:25], epochs[25:])


@given(WORKS, st.integers(0, 99), st.integers(1, 16), st.data())
def test_largest_row_is_in_the_first_global_batch(
    work: np.ndarray, seed: int, global_batch: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(work) - 1))
    order = global_batches(work, seed, global_batch, 2, first)
    assert not len(order) or first in order[0]
    order = global_batches(work, seed, global_batch, 2)
    assert not len(order) or work.argmax() in order[0]


def test_rows_of_a_global_batch_need_similar_work() -> None:
    work = np.random.default_rng(0).lognormal(6, 1, 20_000) ** 2
    order = global_batches(work, 0, 16, 1)
    within = (work[order].max(1) / work[order].min(1)).mean()
    shuffled = work[np.random.default_rng(1).permutation(20_000)].reshape(-1, 16)
    assert within < 0.1 * (shuffled.max(1) / shuffled.min(1)).mean()


@pytest.mark.parametrize("over", [0, 1, 25])
def test_short_windows_are_balanced_too(over: int) -> None:
    """For any number of global batches after the last whole window."""
    work = np.minimum(np.random.default_rng(0).lognormal(6.66, 0.8, (3 * WINDOW + over) * 64), 4096) ** 2
    order = global_batches(work, 0, 64, 1)
    assert max(spread(work[batch], assign(work[batch], 8, 1)) for batch in order) < 0.06


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_row_goes_to_one_rank(ranks: int, micro_batch: int, accumulation: int, data: st.DataObject) -> None:
    rows = ranks * micro_batch * accumulation
    work = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=rows, max_size=rows)), dtype=float)
    assigned = assign(work, ranks, micro_batch)
    assert assigned.shape == (accumulation, ranks, micro_batch)
    assert sorted(assigned.ravel()) == list(range(rows))
    # The rows of a micro-step are adjacent by work, so its ranks end at about the same time.
    by_step = work[assigned].reshape(accumulation, -1)
    assert all(one.min() >= other.max() for one, other in pairwise(by_step))


def test_ranks_are_balanced() -> None:
    assert spread(np.array([4.0, 1.0, 3.0, 2.0]), assign(np.array([4.0, 1.0, 3.0, 2.0]), 2, 1)) == 0
    assert spread(np.array([3.0, 1.0]), np.array([[[0], [1]]])) == pytest.approx(1.0)
    assert spread(np.array([3.0, 1.0]), np.array([[[0]], [[1]]])) == 0
    work = np.random.default_rng(0).lognormal(6, 1, 64)
    assigned = assign(work, 8, 1)
    in_order = np.arange(64).reshape(8, 8, 1)
    assert spread(work, assigned) < 0.25 * spread(work, in_order)
