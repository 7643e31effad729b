"""Packing: joins rows to packed rows with almost no padding."""

from collections.abc import Sequence

import numpy as np

from zerolora.data.packing_bound import Dual, checked, dual_of, reachable
from zerolora.data.packing_fill import STYLES, Pattern, count, fill
from zerolora.data.packing_repair import repaired


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Return the row indices of every packed row: each row once, no packed row over `capacity` tokens.

    lengths: tokens of each row [rows]. Row indices ascend within a packed row, and packed rows are sorted by their
    first. The same lengths give the same packed rows on any machine.

    Rows of equal length are interchangeable, so the search is for patterns of lengths, each used as often as its rows
    last: begin with the longest row, fill the rest exactly with one row or a pair; otherwise add the longest row that
    fits, and repeat. If that misses the lower bound, other styles are tried; then the best packing is repaired (a large
    neighbourhood search, Shaw 1998): packed rows that waste space, and a few others, are taken apart and packed again
    in another style. Effort is limited by counted work, not by time, and grows with the number of rows.

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
    # In patterns made or looked at; a pattern takes longer where the sets of lengths have more bits. Chosen so that
    # packing takes about a second where it is hardest (0.9 s for 20,000 rows of uniform 0.2 to 0.7), and so that a
    # packed row in 10,000 is not worth more of it.
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
