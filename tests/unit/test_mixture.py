"""Splits, weights, duplicates and leakage: the seed places every row, and no held-out row is trained on."""

from typing import Any

import numpy as np
import pytest
from goldens import prepare_settings
from hypothesis import given
from hypothesis import strategies as st

from zerolora.config.schema import Source
from zerolora.data.mixture import Index, mix
from zerolora.errors import UserError

SETTINGS = prepare_settings()
PLAIN = Source()


def index(sources: list[int], rows: list[int] | None = None, prompts: list[int] | None = None) -> Index:
    """Return rows by source; by default, rows and prompts are distinct."""
    hashes = np.array(rows or range(len(sources)), dtype=np.uint64)
    asked = np.array(prompts, np.uint64) if prompts else hashes
    return Index(np.array(sources, np.int16), hashes, asked, asked)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**63 - 1), st.integers(1, 50))
def test_rows_are_split_by_the_seed_alone(validation: int, test: int, seed: int, train: int) -> None:
    settings = prepare_settings(split={"validation": validation, "test": test}, seed=seed)
    rows = index([0] * (validation + test + train))
    actual = mix(rows, settings, [PLAIN])
    assert (actual.times.sum(), len(actual.validation), len(actual.test)) == (train, validation, test)
    everywhere = [*np.flatnonzero(actual.times), *actual.validation, *actual.test]
    assert sorted(everywhere) == list(range(validation + test + train))
    again = mix(rows, settings, [PLAIN])
    assert all(np.array_equal(one, other) for one, other in zip(actual[:3], again[:3], strict=True))


def test_source_with_a_split_goes_there_whole() -> None:
    sources = [PLAIN, Source(split="test"), Source(split="train")]
    settings = prepare_settings(split={"validation": 2, "test": 0})
    actual = mix(index([0] * 5 + [1] * 4 + [2] * 3), settings, sources)
    assert actual.test.tolist() == [5, 6, 7, 8]
    assert actual.times[9:].tolist() == [1, 1, 1]
    assert set(actual.validation) <= set(range(5))


@given(st.lists(st.integers(20, 200), min_size=2, max_size=4), st.data())
def test_weights_are_shares_and_repeat_no_row(sizes: list[int], data: Any) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    sources = [Source(weight=weight) for weight in weights]
    rows = index([number for number, size in enumerate(sizes) for _ in range(size)])
    actual = mix(rows, SETTINGS, sources)
    assert actual.times.max() == 1
    available = np.bincount(np.delete(rows.source, [*actual.validation, *actual.test]), minlength=len(sizes))
    taken = np.bincount(rows.source, actual.times, len(sizes))
    shares = np.array(weights) / sum(weights)
    total = (available / shares).min()
    assert np.all(np.abs(taken - shares * total) <= 1 + 1e-6)
    # One source is used up: more rows in these shares would repeat one.
    assert any(taken == available)


def test_count_of_rows_is_exact_and_repeats_if_needed() -> None:
    sources = [Source(rows=25), Source(rows=4), PLAIN]
    rows = index([0] * 10 + [1] * 10 + [2] * 10)
    actual = mix(rows, SETTINGS, sources)
    held_out = {*actual.validation, *actual.test}
    assert actual.times[:10].sum() == 25
    repeated = [times for row, times in enumerate(actual.times[:10]) if row not in held_out]
    assert max(repeated) - min(repeated) <= 1
    assert actual.times[10:20].sum() == 4
    assert all(actual.times[row] == 0 for row in held_out)


@pytest.mark.parametrize("drop", [False, True])
def test_duplicates_are_counted_and_dropped_by_setting(drop: bool) -> None:
    hashes = [1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 2]
    settings = prepare_settings(duplicates="drop" if drop else "report")
    actual = mix(index([0] * 11, hashes), settings, [PLAIN])
    assert actual.counts["duplicate_rows"] == 3
    kept = [*np.flatnonzero(actual.times), *actual.validation, *actual.test]
    assert sorted(kept) == list(range(8 if drop else 11))
    if drop:
        assert actual.counts["leaked_rows"] == 0


@given(st.lists(st.integers(0, 9), min_size=30, max_size=60), st.integers(0, 99))
def test_leaked_prompts_are_counted_and_dropped_by_setting(prompts: list[int], seed: int) -> None:
    """Ten prompts, each many times with other answers; hashes over the whole range of 64 bits."""
    prompts = [number << 57 for number in (*prompts, *range(100, 110))]
    rows = index([0] * len(prompts), prompts=prompts)
    reported = mix(rows, prepare_settings(seed=seed), [PLAIN])
    by_row = np.array(prompts, np.uint64)
    held_out = {*by_row[reported.validation], *by_row[reported.test]}
    leaked = [row for row in np.flatnonzero(reported.times) if by_row[row] in held_out]
    assert reported.counts["leaked_prompts"] == len(leaked)
    assert reported.counts["leaked_rows"] == 0  # the rows themselves differ
    settings = prepare_settings(seed=seed, leakage="drop")
    if reported.counts["leaked_validation_prompts"] == len(reported.validation):
        with pytest.raises(UserError, match="no row is left for validation"):
            mix(rows, settings, [PLAIN])
        return
    dropped = mix(rows, settings, [PLAIN])
    assert not {*by_row[np.flatnonzero(dropped.times)]} & held_out
    assert not {*by_row[dropped.validation]} & {*by_row[dropped.test]}


def test_empty_split_is_refused() -> None:
    with pytest.raises(UserError, match=r"rows\.json: has 5 rows, and split takes 5; lower split"):
        mix(index([0] * 5), SETTINGS, [PLAIN])
    with pytest.raises(UserError, match=r"rows\.json: has 0 rows, and split takes 5; add rows"):
        mix(index([]), SETTINGS, [PLAIN])
    sources = [PLAIN, Source(split="validation")]
    with pytest.raises(UserError, match="no row is left for validation"):
        mix(index([0] * 9), prepare_settings(split={"validation": 0, "test": 2}, sources={"held": sources[1]}), sources)
    with pytest.raises(UserError, match="no row is left for test"):
        settings = prepare_settings(split={"validation": 2, "test": 0}, sources={"held": Source(split="test")})
        mix(index([0] * 9), settings, [PLAIN, Source(split="test")])
