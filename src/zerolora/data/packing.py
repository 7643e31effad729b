"""Which rows share a packed row, so that next to nothing of it is padding."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from zerolora.errors import UserError


class Pattern(NamedTuple):
    """The lengths that fill a packed row, and how many packed rows are filled like it."""

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


class Dual(NamedTuple):
    """A proven lower bound, and why: no packed row can hold rows that are worth more than `whole`.

    worth: the worth of a row by its length; `bound` is the worth of all rows in units of `whole`, rounded up.
    """

    bound: int
    worth: dict[int, int]
    whole: int


# The first does best on most data, the others where it misses the bound. Repair takes them in turn.
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
PATIENCE = 16  # rounds of repair without a gain, after which there seldom is one
ONE_IN = (40, 20, 10, 5, 3)  # of packed rows that waste nothing, a round packs one in so many again


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Return the row numbers of every packed row: each row once, none over `capacity` tokens.

    lengths: tokens of each row [rows]. Row numbers ascend within a packed row, and packed rows follow each other by
    their first. The same lengths give the same packed rows, on any machine.

    Rows of one length are alike, so patterns of lengths are sought, each used as often as its rows last: begin with
    the longest row, fill the rest exactly with one row or a pair, else put in the longest that fits and go on. Where
    that misses the lower bound, other styles are tried; then the best packing is repaired (a large neighbourhood
    search, Shaw 1998): packed rows that waste something, and a few of the others, are taken apart and packed again
    in another style. Work is counted, not timed, and grows with the number of rows.

    Raises UserError for a row shorter than 1 or longer than `capacity`.
    """
    tokens = _checked(lengths, capacity)
    if not len(tokens):
        return []
    values, counts = np.unique(tokens, return_counts=True)
    reachable = _reachable(values, counts, capacity)
    histogram = dict(zip(values.tolist(), counts.tolist(), strict=True))
    patterns = _search(histogram, reachable, _dual(values, counts, reachable))
    in_order = np.split(np.argsort(tokens, kind="stable"), np.cumsum(counts)[:-1])
    rows = {length: iter(part.tolist()) for length, part in zip(histogram, in_order, strict=True)}
    return sorted(
        sorted([next(rows[length]) for length in pattern.lengths]) for pattern in patterns for _ in range(pattern.times)
    )


def lower_bound(lengths: Sequence[int] | np.ndarray, capacity: int) -> int:
    """Return a number of packed rows that no packing of these rows can go below.

    The highest of four families of dual feasible functions, at their best parameters: Martello and Toth's L2 (Discrete
    Applied Mathematics 28, 1990), Fekete and Schepers' u^(k) (Mathematical Programming 91, 2001), Carlier, Clautiaux
    and Moukrim's f_CCM1 (Computers & Operations Research 34, 2007), Burdet and Johnson's f_BJ1 (1977), both as in
    Clautiaux, Alves and Valério de Carvalho's survey (Annals of Operations Research 179, 2010). The capacity is first
    lowered to the largest sum that any rows have. Never below ceil(tokens / capacity).

    Raises UserError as `pack` does.
    """
    tokens = _checked(lengths, capacity)
    if not len(tokens):
        return 0
    values, counts = np.unique(tokens, return_counts=True)
    return _dual(values, counts, _reachable(values, counts, capacity)).bound


def _checked(lengths: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    tokens = np.asarray(lengths)
    if not len(tokens):
        return tokens
    assert tokens.ndim == 1 and tokens.dtype.kind in "iu", "lengths are whole numbers"
    wrong = np.flatnonzero((tokens < 1) | (tokens > capacity))
    if len(wrong):
        row = int(wrong[0])
        remedy = "leave it out"
        if tokens[row] > capacity:
            remedy = "raise pack.capacity, or cut rows with prepare's max_length and too_long"
        raise UserError(f"row {row} has {tokens[row]} tokens, and pack.capacity is {capacity}; {remedy}")
    return tokens.astype(np.int64)


def _search(histogram: dict[int, int], capacity: int, dual: Dual) -> list[Pattern]:
    """Return a packing of the rows counted by length in `histogram`: the best that the work allowed finds."""
    # In patterns made or looked at; a pattern takes longer where the sets of lengths have more bits.
    work = (60_000 + sum(histogram.values())) // (1 + capacity // 32_768)
    enough = dual.bound + dual.bound // 10_000
    best: list[Pattern] = []
    for style in STYLES:
        found = _fill(dict(histogram), capacity, style)
        work -= len(found)
        if not best or _count(found) < _count(best):
            best = found
        if _count(best) <= enough or work < 0:
            return best
    return _repaired(best, capacity, dual, enough, work)


def _repaired(patterns: list[Pattern], capacity: int, dual: Dual, enough: int, work: int) -> list[Pattern]:
    """Return a packing of the same rows, with `enough` packed rows or as few as the work allowed reaches."""
    count, in_vain = _count(patterns), 0
    full, wasteful = _judged(patterns, dual)
    for round_ in itertools.count():
        if count <= enough or work < 0 or in_vain == PATIENCE:
            break
        kept, taken = _divided(full, round_)
        freed: Counter[int] = Counter()
        for lengths, times in wasteful + taken:
            for length in lengths:
                freed[length] += times
        again = _fill(freed, capacity, STYLES[round_ % len(STYLES)])
        work -= len(full) // 8 + len(again)
        gained = _count(wasteful) + _count(taken) - _count(again)
        in_vain = 0 if gained > 0 else in_vain + 1
        # As good is good enough: the next round then starts from somewhere else.
        if gained >= 0:
            count -= gained
            full, wasteful = _judged(again, dual)
            full = kept + full
    return full + wasteful


def _count(patterns: list[Pattern]) -> int:
    return sum([times for _, times in patterns])


def _judged(patterns: list[Pattern], dual: Dual) -> tuple[list[Pattern], list[Pattern]]:
    """Return the patterns that are worth a whole packed row, which is the most there is, and the others."""
    full: list[Pattern] = []
    wasteful: list[Pattern] = []
    for pattern in patterns:
        worth = sum([dual.worth[length] for length in pattern.lengths])
        (full if worth == dual.whole else wasteful).append(pattern)
    return full, wasteful


def _divided(patterns: list[Pattern], round_: int) -> tuple[list[Pattern], list[Pattern]]:
    """Return the packed rows that stay, and a share to pack again: in each round other ones."""
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


def _fill(left: dict[int, int], capacity: int, style: Style) -> list[Pattern]:
    """Return patterns that use up the rows counted by length in `left`."""
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
    """Return the lengths to put next into a packed row with `rest` tokens free; none if none fits."""
    fitting = present & ((2 << rest) - 1)
    if not fitting:
        return []
    longest = fitting.bit_length() - 1
    if rest > 2 * longest:
        # As many as leave room for a last pair.
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


def _reachable(values: np.ndarray, counts: np.ndarray, capacity: int) -> int:
    """Return the largest number of tokens that a packed row can hold, at most `capacity`."""
    capacity -= capacity % int(np.gcd.reduce(values))
    sums, within = 1, (2 << capacity) - 1
    # The longest rows may not even fit beside the shortest.
    beside = int(np.searchsorted(values, capacity - values[0], side="right"))
    for length, count in zip(values[:beside].tolist(), counts[:beside].tolist(), strict=True):
        several, unused = 1, min(count, capacity // length)
        while unused:
            several = min(several, unused)
            sums |= sums << (several * length) & within
            unused -= several
            several *= 2
        if sums >> capacity:
            return capacity
    return max(sums.bit_length() - 1, int(values[-1]))


# A family of dual feasible functions gives, for a parameter, the worth of each length and that of a whole packed row.
Family = Callable[[np.ndarray, int, int], tuple[np.ndarray, int]]


def _dual(values: np.ndarray, counts: np.ndarray, capacity: int) -> Dual:
    """Return the best dual of rows of lengths `values` [distinct lengths], `counts` of each."""
    # A function changes where its parameter divides the capacity or is a length that occurs.
    breaks = [*(capacity // np.arange(1, 41)), *(capacity // np.arange(1, 41) + 1)]
    places = np.unique(np.concatenate([values, capacity - values, breaks]))
    places = places[(places > 0) & (places <= capacity)]
    half = places[2 * places <= capacity]
    total, whole, worth = int(values @ counts), capacity, values
    families: list[tuple[Family, np.ndarray]] = [(_l2, half), (_u, np.arange(1, 41)), (_ccm1, half), (_bj1, places)]
    for family, parameters in families:
        for parameter in _promising(family, parameters, values, counts, capacity):
            its_worth, its_whole = family(values, capacity, int(parameter))
            its_total = int(its_worth @ counts)
            if its_total * whole > total * its_whole:
                total, whole, worth = its_total, its_whole, its_worth
    return Dual(-(-total // whole), dict(zip(values.tolist(), worth.tolist(), strict=True)), whole)


def _promising(
    family: Family, parameters: np.ndarray, values: np.ndarray, counts: np.ndarray, capacity: int
) -> np.ndarray:
    """Return the parameters around the best of a few hundred, as they do on a thousand of the lengths."""
    step = -(-len(values) // 1024)
    few, many = values[::step], np.add.reduceat(counts, np.arange(0, len(values), step))
    stride = 1 + len(parameters) // 400
    best, highest = 0, (0, 1)
    for place in range(0, len(parameters), stride):
        worth, whole = family(few, capacity, int(parameters[place]))
        total = int(worth @ many)
        if total * highest[1] > highest[0] * whole:
            best, highest = place, (total, whole)
    reach = min(stride, 1 + 1_000_000 // len(values))
    return parameters[max(0, best - reach) : best + reach + 1]


def _l2(values: np.ndarray, capacity: int, shortest: int) -> tuple[np.ndarray, int]:
    """Rows below `shortest` count nothing, so rows that only those fit beside count as whole."""
    worth = np.where(values > capacity - shortest, capacity, values)
    return np.where(values < shortest, 0, worth), capacity


def _u(values: np.ndarray, capacity: int, k: int) -> tuple[np.ndarray, int]:
    """At most k rows longer than capacity / (k + 1) fit."""
    scaled = (k + 1) * values
    return np.where(scaled % capacity == 0, k * values, scaled // capacity * capacity), k * capacity


def _ccm1(values: np.ndarray, capacity: int, unit: int) -> tuple[np.ndarray, int]:
    """Rows up to half count in whole units, longer ones what units they leave no room for."""
    units = capacity // unit
    worth = np.where(2 * values < capacity, 2 * (values // unit), 2 * (units - (capacity - values) // unit))
    return np.where(2 * values == capacity, units, worth), 2 * units


def _bj1(values: np.ndarray, capacity: int, unit: int) -> tuple[np.ndarray, int]:
    """Rows count in units, and what is over a unit by how far it exceeds what the capacity has over."""
    over = capacity % unit
    return values // unit * (unit - over) + np.maximum(values % unit - over, 0), capacity // unit * (unit - over)
