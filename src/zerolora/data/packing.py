"""Packing: joins rows to packed rows with almost no padding.

Packed rows are filled greedily, by patterns of lengths that are each repeated until a length runs out, and repaired by
a large neighbourhood search (Shaw, CP 1998).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from zerolora.data.packing_bound import Dual, checked, dual_of, reachable

# Chosen by the excess of packed rows over the lower bound, summed over the four sets of benchmarks/packing.py at 4096
# tokens that need repair (20,000 rows each, 38,000 packed rows), on 2026-11-23. A test checks the order.
PATIENCE = 16
"""Rounds without a gain before repair stops. Excess: 41 with 4 rounds, 30 with 8, 24 with 16, and 24 with 64."""
ONE_IN = (40, 20, 10, 5, 3)
"""Each round repacks one in this many of the packed rows without free space. Excess: 24 with these in turn, 26 with 40
alone, 44 with 10 alone, 122 with 3 alone. A 100 before the 40 would leave 18, but change existing packings."""


class Pattern(NamedTuple):
    """The lengths of the rows in a packed row, and the number of packed rows with these lengths."""

    lengths: list[int]
    times: int


class Style(NamedTuple):
    """A way to fill packed rows.

    alternate: start with the longest and the shortest row in turn, not always with the longest. spread: of the pairs
    that fill the rest exactly, take the most uneven one, not the most even one. slack: one row that leaves at most
    1/slack of the capacity free counts as exact.
    """

    alternate: bool = False
    spread: bool = False
    slack: int | None = None


# The first is best on most data; the others are tried if it misses the bound. Repair uses them in turn.
STYLES = (
    Style(),
    Style(spread=True),
    Style(alternate=True),
    Style(slack=128),
    Style(slack=512),
    Style(spread=True, slack=128),
    Style(alternate=True, slack=128),
    Style(slack=8),
)


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Return the row indices of every packed row: each row once, no packed row over `capacity` tokens.

    lengths: tokens of each row [rows]. Row indices ascend within a packed row, and packed rows are sorted by their
    first. The same lengths give the same packed rows on any machine.

    Rows of equal length are interchangeable, so the search is over patterns of lengths, each repeated until one of its
    lengths runs out: start with the longest row; fill the rest exactly with one row or a pair, otherwise add the
    longest row that fits, and repeat. If that misses the lower bound, other styles are tried, and the best packing is
    repaired: packed rows with free space, and a few others, are packed again in another style. Effort is limited by
    counted work, not by time, and grows with the number of rows.

    Raises UserError for a row shorter than 1 or longer than `capacity`.
    """
    tokens = checked(lengths, capacity)
    if not len(tokens):
        return []
    values, counts = np.unique(tokens, return_counts=True)
    largest = reachable(values, counts, capacity)
    histogram = dict(zip(values.tolist(), counts.tolist(), strict=True))
    patterns = _search(histogram, largest, dual_of(values, counts, largest))
    in_order = np.split(np.argsort(tokens, kind="stable"), np.cumsum(counts)[:-1])
    rows = {length: iter(part.tolist()) for length, part in zip(histogram, in_order, strict=True)}
    return sorted(
        sorted([next(rows[length]) for length in pattern.lengths]) for pattern in patterns for _ in range(pattern.times)
    )


def _search(histogram: dict[int, int], capacity: int, dual: Dual) -> list[Pattern]:
    """Return the best packing of the rows in `histogram` ({length: rows}) that the work limit allows."""
    # Counted in patterns; a pattern takes longer if the sets of lengths have more bits. Chosen so that the hardest
    # packing takes about a second (0.9 s for 20,000 rows of uniform 0.2 to 0.7). One packed row in 10,000 is not worth
    # more work.
    work = (60_000 + sum(histogram.values())) // (1 + capacity // 32_768)
    enough = dual.bound + dual.bound // 10_000
    best: list[Pattern] = []
    for style in STYLES:
        result = fill(dict(histogram), capacity, style)
        work -= len(result)
        if not best or count(result) < count(best):
            best = result
        if count(best) <= enough or work < 0:
            return best
    return repaired(best, capacity, dual, enough, work)


def count(patterns: list[Pattern]) -> int:
    return sum([times for _, times in patterns])


def fill(left: dict[int, int], capacity: int, style: Style) -> list[Pattern]:
    """Return patterns that use all rows in `left` ({length: rows}), which is emptied."""
    # Bit l is set if a row of length l is left; mirrored, bit capacity - l.
    present = _bits(left, capacity)
    mirrored = _bits((capacity - length for length in left), capacity)
    patterns: list[Pattern] = []

    def use(length: int, rows: int) -> None:
        nonlocal present, mirrored
        left[length] -= rows
        if not left[length]:
            present ^= 1 << length
            mirrored ^= 1 << (capacity - length)

    shortest = min(left, default=0)
    while present:
        if not left[shortest]:
            shortest = (present & -present).bit_length() - 1
        chosen = [shortest if style.alternate and len(patterns) % 2 else present.bit_length() - 1]
        lengths: list[int] = []
        uses: dict[int, int] = {}
        rest = capacity
        while chosen:
            for length in chosen:
                uses[length] = uses.get(length, 0) + 1
                use(length, 1)
            lengths += chosen
            rest -= sum(chosen)
            chosen = _next(present, mirrored, left, capacity, rest, style) if rest >= shortest else []
        more = min([left[length] // used for length, used in uses.items()])
        if more:
            for length, used in uses.items():
                use(length, more * used)
        patterns.append(Pattern(lengths, 1 + more))
    return patterns


def _next(present: int, mirrored: int, left: dict[int, int], capacity: int, rest: int, style: Style) -> list[int]:
    """Return the next lengths for a packed row with `rest` free tokens; empty if none fits."""
    fitting = present & ((2 << rest) - 1)
    if not fitting:
        return []
    longest = fitting.bit_length() - 1
    if rest > 2 * longest:
        # As many as leave room for a final pair.
        return [longest] * min(left[longest], -(-rest // longest) - 2)
    slack = capacity // style.slack if style.slack else 0
    if rest - longest <= slack:
        return [longest]
    # Bit l of the shifted mirror is set if a row of length rest - l is left.
    pairs = fitting & (mirrored >> (capacity - rest)) & ((2 << rest // 2) - 1)
    while pairs:
        shorter = (pairs & -pairs if style.spread else pairs).bit_length() - 1
        if 2 * shorter < rest or left[shorter] > 1:
            return [rest - shorter, shorter]
        pairs ^= 1 << shorter
    return [longest]


def _bits(positions: Iterable[int], highest: int) -> int:
    flags = np.zeros(highest + 1, dtype=np.uint8)
    flags[np.fromiter(positions, dtype=np.int64)] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def repaired(patterns: list[Pattern], capacity: int, dual: Dual, enough: int, work: int) -> list[Pattern]:
    """Return a packing of the same rows with at most `enough` packed rows, or as few as the work limit allows."""
    rows, idle = count(patterns), 0
    full, wasteful = _by_waste(patterns, dual)
    for round_ in itertools.count():
        if rows <= enough or work < 0 or idle == PATIENCE:
            break
        kept, taken = _divide(full, round_)
        freed: Counter[int] = Counter()
        for lengths, times in wasteful + taken:
            for length in lengths:
                freed[length] += times
        again = fill(freed, capacity, STYLES[round_ % len(STYLES)])
        work -= len(full) // 8 + len(again)
        gained = count(wasteful) + count(taken) - count(again)
        idle = 0 if gained > 0 else idle + 1
        # An equally good packing is accepted too, so that the next round starts from another one.
        if gained >= 0:
            rows -= gained
            full, wasteful = _by_waste(again, dual)
            full = kept + full
    return full + wasteful


def _by_waste(patterns: list[Pattern], dual: Dual) -> tuple[list[Pattern], list[Pattern]]:
    """Return the patterns with the maximum worth, a whole packed row, and the others."""
    full, wasteful = list[Pattern](), list[Pattern]()
    for pattern in patterns:
        worth = sum([dual.worth[length] for length in pattern.lengths])
        (full if worth == dual.whole else wasteful).append(pattern)
    return full, wasteful


def _divide(patterns: list[Pattern], round_: int) -> tuple[list[Pattern], list[Pattern]]:
    """Return the packed rows to keep, and a share to pack again that differs from round to round."""
    kept, taken = [], []
    one_in = ONE_IN[round_ % len(ONE_IN)]
    due = round_ * 7 % one_in
    for pattern in patterns:
        leaving, due = divmod(due + pattern.times, one_in)
        if not leaving:
            kept.append(pattern)
            continue
        taken.append(Pattern(pattern.lengths, leaving))
        if leaving < pattern.times:
            kept.append(Pattern(pattern.lengths, pattern.times - leaving))
    return kept, taken
