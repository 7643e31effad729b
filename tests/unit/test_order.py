"""The order of packed rows: fixed by seed and global batch; and their balance between the ranks of a global batch."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolora.schedules import steps_in
from zerolora.train.order import ABSENT, WINDOW, assign, assign_padded, global_batches, spread

WORKS = st.lists(st.integers(1, 10**6), min_size=1, max_size=300).map(lambda values: np.array(values, dtype=float))


@given(WORKS, st.integers(0, 99), st.integers(1, 16), st.integers(1, 3), st.booleans())
def test_epochs_see_every_row_once(work: np.ndarray, seed: int, global_batch: int, epochs: int, alike: bool) -> None:
    order = global_batches(work, seed, global_batch, epochs, by_length=alike)
    assert len(order) == steps_in(len(work), epochs, global_batch)
    assert [len(batch) for batch in order[:-1]] == [global_batch] * (len(order) - 1)
    assert np.bincount(np.concatenate(order), minlength=len(work)).tolist() == [epochs] * len(work)
    assert same(order, global_batches(work, seed, global_batch, epochs, by_length=alike))
    # A run with one more epoch starts with it, but for the rows that are left.
    part = global_batches(work, seed, global_batch, epochs - 0.25, by_length=alike)
    assert sum(map(len, part)) == int(len(work) * (epochs - 0.25)) and same(part[:-1], order[: len(part) - 1])
    longer = global_batches(work, seed, global_batch, epochs + 1, by_length=alike)
    assert same(order[:-1], longer[: len(order) - 1])


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return [batch.tolist() for batch in one] == [batch.tolist() for batch in other]


@given(st.integers(1, 80), st.integers(1, 16), st.integers(0, 99), st.booleans())
def test_epochs_do_not_overlap(batches: int, global_batch: int, seed: int, alike: bool) -> None:
    rows = batches * global_batch
    order = global_batches(np.arange(rows), seed, global_batch, 3, by_length=alike)
    for epoch in np.concatenate(order).reshape(3, rows):
        assert sorted(epoch) == list(range(rows))


def test_rows_are_in_no_order_of_length() -> None:
    """A plain shuffle, but for the first row."""
    work = np.random.default_rng(0).lognormal(6, 1, 20_000) ** 2
    order = np.concatenate(global_batches(work, 0, 16, 1))
    shuffled = np.random.default_rng([0, 0]).permutation(20_000)
    assert order[0] == work.argmax()
    assert order[1:].tolist() == shuffled[shuffled != work.argmax()].tolist()


def test_order_depends_on_seed_and_epoch() -> None:
    work = np.arange(100.0)
    assert not same(global_batches(work, 1, 4, 1), global_batches(work, 2, 4, 1))
    epochs = global_batches(work, 1, 4, 2)
    assert not same(epochs[:25], epochs[25:])


@given(WORKS, st.integers(0, 99), st.integers(1, 16), st.data())
def test_largest_row_is_in_the_first_global_batch(
    work: np.ndarray, seed: int, global_batch: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(work) - 1))
    alike = data.draw(st.booleans())
    assert first in global_batches(work, seed, global_batch, 2, first, alike)[0]
    assert work.argmax() in global_batches(work, seed, global_batch, 2, by_length=alike)[0]


def test_rows_of_a_global_batch_grouped_by_length_need_similar_work() -> None:
    work = np.random.default_rng(0).lognormal(6, 1, 20_000) ** 2
    order = np.array(global_batches(work, 0, 16, 1, by_length=True))
    within = (work[order].max(1) / work[order].min(1)).mean()
    shuffled = work[np.random.default_rng(1).permutation(20_000)].reshape(-1, 16)
    assert within < 0.1 * (shuffled.max(1) / shuffled.min(1)).mean()


@pytest.mark.parametrize("over", [0, 1, 25])
def test_short_windows_are_balanced_too(over: int) -> None:
    """For any number of global batches after the last whole window."""
    work = np.minimum(np.random.default_rng(0).lognormal(6.66, 0.8, (3 * WINDOW + over) * 64), 4096) ** 2
    order = global_batches(work, 0, 64, 1, by_length=True)
    assert max(spread(work[batch], assign(work[batch], 8, 1)) for batch in order) < 0.06


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_row_goes_to_one_rank(ranks: int, micro_batch: int, accumulation: int, data: st.DataObject) -> None:
    rows = ranks * micro_batch * accumulation
    work = np.array(data.draw(st.lists(st.integers(1, 1000), min_size=rows, max_size=rows)), dtype=float)
    assigned = assign(work, ranks, micro_batch)
    assert assigned.shape == (accumulation, ranks, micro_batch)
    assert sorted(assigned.ravel()) == list(range(rows))
    # Of fewer rows, each still goes to one rank, and every rank makes as many micro-batches.
    fewer = assign(work[: data.draw(st.integers(1, rows))], ranks, micro_batch, rows)
    assert fewer.shape == assigned.shape
    present = fewer[fewer != ABSENT]
    assert sorted(present) == list(range(len(present)))
    # The rows of a micro-step are adjacent by work, so its ranks end at about the same time.
    by_step = work[assigned].reshape(accumulation, -1)
    assert all(one.min() >= other.max() for one, other in pairwise(by_step))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.data())
def test_padded_micro_batches_are_no_larger_than_the_longest_rows_make_them(
    ranks: int, micro_batch: int, accumulation: int, data: st.DataObject
) -> None:
    places = ranks * micro_batch * accumulation
    rows = data.draw(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=places))
    lengths = np.array([length for length, _ in rows])
    supervised = np.array([int(length * share) for length, share in rows])
    assigned = assign_padded(lengths, supervised, ranks, micro_batch, places)
    assert assigned.shape[:2] == (accumulation, ranks)
    present = assigned != ABSENT
    assert sorted(assigned[present]) == list(range(len(rows)))
    longest = np.where(present, lengths[assigned], 0).max(2)
    assert (longest * present.sum(2)).max() <= micro_batch * lengths.max()
    assert np.where(present, supervised[assigned], 0).sum(2).max() <= micro_batch * supervised.max()
    assert present.any(2).sum() == min(len(rows), ranks * accumulation), "no rank is idle while another has two rows"


def test_padded_micro_batches_have_little_padding_and_equal_sizes() -> None:
    """Of a plain shuffle; positions of the slowest rank of each micro-step against ranks with equal shares."""
    draw = np.random.default_rng(0)
    computed = slowest = real = 0
    for _ in range(50):
        lengths = np.clip(draw.lognormal(6.6, 0.8, 64), 1, 4096).astype(int)
        assigned = assign_padded(lengths, lengths, 8, 4)
        present = assigned != ABSENT
        positions = np.where(present, lengths[assigned], 0).max(2) * present.sum(2)
        computed, slowest = computed + positions.sum(), slowest + 8 * positions.max(1).sum()
        real += lengths.sum()
    assert computed < 1.12 * real and slowest < 1.3 * real


def test_ranks_are_balanced() -> None:
    assert spread(np.array([4.0, 1.0, 3.0, 2.0]), assign(np.array([4.0, 1.0, 3.0, 2.0]), 2, 1)) == 0
    assert spread(np.array([3.0, 1.0]), np.array([[[0], [1]]])) == pytest.approx(1.0)
    assert spread(np.array([3.0, 1.0]), np.array([[[0]], [[1]]])) == 0
    assert spread(np.array([3.0, 1.0]), np.array([[[0], [ABSENT]], [[ABSENT], [1]]])) == pytest.approx(1.0)
    work = np.random.default_rng(0).lognormal(6, 1, 64)
    assigned = assign(work, 8, 1)
    in_order = np.arange(64).reshape(8, 8, 1)
    assert spread(work, assigned) < 0.25 * spread(work, in_order)
