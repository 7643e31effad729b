"""Improves a packing by a large neighbourhood search (Shaw, CP 1998)."""

import itertools
from collections import Counter

from zerolora.data.packing_bound import Dual
from zerolora.data.packing_fill import STYLES, Pattern, count, fill

# A choice, not an optimum: packed rows above the lower bound, summed over the four sets of benchmarks/packing.py at
# 4096 tokens that need repair (20,000 rows each, 38,000 packed rows), on 2026-11-23. A test holds the order.
PATIENCE = 16
"""Rounds of repair without a gain, after which there seldom is one: 41 packed rows are left with 4 rounds, 30 with 8,
24 with 16, and 24 with 64."""
ONE_IN = (40, 20, 10, 5, 3)
"""Of packed rows that waste nothing, a round packs one in so many again: 24 are left with these in turn, 26 with 40
alone, 44 with 10 alone, 122 with 3 alone. 100 before the 40 would leave 18, and change packings that runs rest on."""


def repaired(patterns: list[Pattern], capacity: int, dual: Dual, enough: int, work: int) -> list[Pattern]:
    """Return a packing of the same rows, with `enough` packed rows or as few as the work limit allows."""
    rows, in_vain = count(patterns), 0
    full, wasteful = _judged(patterns, dual)
    for round_ in itertools.count():
        if rows <= enough or work < 0 or in_vain == PATIENCE:
            break
        kept, taken = _divided(full, round_)
        freed: Counter[int] = Counter()
        for lengths, times in wasteful + taken:
            for length in lengths:
                freed[length] += times
        again = fill(freed, capacity, STYLES[round_ % len(STYLES)])
        work -= len(full) // 8 + len(again)
        gained = count(wasteful) + count(taken) - count(again)
        in_vain = 0 if gained > 0 else in_vain + 1
        # An equally good packing is accepted too, so that the next round starts from a different one.
        if gained >= 0:
            rows -= gained
            full, wasteful = _judged(again, dual)
            full = kept + full
    return full + wasteful


def _judged(patterns: list[Pattern], dual: Dual) -> tuple[list[Pattern], list[Pattern]]:
    """Return the patterns that are worth a whole packed row, the maximum, and the others."""
    full: list[Pattern] = []
    wasteful: list[Pattern] = []
    for pattern in patterns:
        worth = sum([dual.worth[length] for length in pattern.lengths])
        (full if worth == dual.whole else wasteful).append(pattern)
    return full, wasteful


def _divided(patterns: list[Pattern], round_: int) -> tuple[list[Pattern], list[Pattern]]:
    """Return the packed rows to keep, and a share to pack again, which differs from round to round."""
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
