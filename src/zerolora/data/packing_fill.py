"""Greedy filling of packed rows, by patterns of lengths that are each used as often as their rows last."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Pattern(NamedTuple):
    """The lengths of the rows in a packed row, and the number of packed rows with these lengths."""

    lengths: list[int]
    times: int


class Style(NamedTuple):
    """A way to fill packed rows.

    alternate: begin with the longest and the shortest row in turn, not always with the longest. spread: of the pairs
    that fill a rest exactly, take the one with the shortest row, not the most even one. slack: one row that leaves
    1/slack of the capacity empty counts as exact.
    """

    alternate: bool = False
    spread: bool = False
    slack: int | None = None


# The first is best on most data, the others help if it misses the bound. Repair uses them in turn.
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


def count(patterns: list[Pattern]) -> int:
    return sum([times for _, times in patterns])


def fill(left: dict[int, int], capacity: int, style: Style) -> list[Pattern]:
    """Return patterns that use up all rows in `left` ({length: rows})."""
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
    """Return the lengths to add next to a packed row with `rest` free tokens; empty if none fits."""
    fitting = present & ((2 << rest) - 1)
    if not fitting:
        return []
    longest = fitting.bit_length() - 1
    if rest > 2 * longest:
        # As many as possible that leave room for a last pair.
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


def _bits(places: Iterable[int], highest: int) -> int:
    flags = np.zeros(highest + 1, dtype=np.uint8)
    flags[np.fromiter(places, dtype=np.int64)] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
