"""A lower bound on the number of packed rows, and its proof."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from zerolora.errors import UserError


class Dual(NamedTuple):
    """A lower bound with its proof: the rows of a packed row are worth at most `whole`.

    worth: the worth of a row by its length. bound: the worth of all rows divided by `whole`, rounded up.
    """

    bound: int
    worth: dict[int, int]
    whole: int


def lower_bound(lengths: Sequence[int] | np.ndarray, capacity: int) -> int:
    """Return a lower bound on the number of packed rows that these rows need.

    It is the maximum over four families of dual feasible functions, at their best parameters: Martello and Toth's L2
    (Discrete Applied Mathematics 28, 1990), Fekete and Schepers' u^(k) (Mathematical Programming 91, 2001), Carlier,
    Clautiaux and Moukrim's f_CCM1 (Computers & Operations Research 34, 2007), Burdet and Johnson's f_BJ1 (1977), both
    as in Clautiaux, Alves and Valério de Carvalho's survey (Annals of Operations Research 179, 2010). The capacity is
    first lowered to the largest sum that any rows reach. The bound is at least ceil(tokens / capacity).

    Raises UserError as `pack` does.
    """
    tokens = checked(lengths, capacity)
    if not len(tokens):
        return 0
    values, counts = np.unique(tokens, return_counts=True)
    return dual_of(values, counts, reachable(values, counts, capacity)).bound


def checked(lengths: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
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


def reachable(values: np.ndarray, counts: np.ndarray, capacity: int) -> int:
    """Return the maximum number of tokens in a packed row of these lengths, at most `capacity`."""
    capacity -= capacity % int(np.gcd.reduce(values))
    sums, within = 1, (2 << capacity) - 1
    # The longest rows may not fit together even with the shortest.
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


# A family of dual feasible functions: (lengths, capacity, parameter) -> worth of each length and of a whole packed row.
Family = Callable[[np.ndarray, int, int], tuple[np.ndarray, int]]


def dual_of(values: np.ndarray, counts: np.ndarray, capacity: int) -> Dual:
    """Return the best dual for `counts` rows of each length in `values`; both [distinct lengths]."""
    # A function changes only where its parameter divides the capacity or equals an existing length.
    breaks = [*(capacity // np.arange(1, 41)), *(capacity // np.arange(1, 41) + 1)]
    units = np.unique(np.concatenate([values, capacity - values, breaks]))
    units = units[(units > 0) & (units <= capacity)]
    half = units[2 * units <= capacity]
    total, whole, worth = int(values @ counts), capacity, values
    families: list[tuple[Family, np.ndarray]] = [(_l2, half), (_u, np.arange(1, 41)), (_ccm1, half), (_bj1, units)]
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
    """Return the parameters around the best of about 400, for a sample of about 1,000 lengths."""
    step = -(-len(values) // 1024)
    few, many = values[::step], np.add.reduceat(counts, np.arange(0, len(values), step))
    stride = 1 + len(parameters) // 400
    best, highest = 0, (0, 1)
    for index in range(0, len(parameters), stride):
        worth, whole = family(few, capacity, int(parameters[index]))
        total = int(worth @ many)
        if total * highest[1] > highest[0] * whole:
            best, highest = index, (total, whole)
    reach = min(stride, 1 + 1_000_000 // len(values))
    return parameters[max(0, best - reach) : best + reach + 1]


def _l2(values: np.ndarray, capacity: int, shortest: int) -> tuple[np.ndarray, int]:
    """Rows below `shortest` are worth nothing; rows that leave space only for these, a whole packed row."""
    worth = np.where(values > capacity - shortest, capacity, values)
    return np.where(values < shortest, 0, worth), capacity


def _u(values: np.ndarray, capacity: int, k: int) -> tuple[np.ndarray, int]:
    """At most k rows longer than capacity / (k + 1) fit."""
    scaled = (k + 1) * values
    return np.where(scaled % capacity == 0, k * values, scaled // capacity * capacity), k * capacity


def _ccm1(values: np.ndarray, capacity: int, unit: int) -> tuple[np.ndarray, int]:
    """Rows up to half the capacity are worth whole units, longer rows the units that they leave no space for."""
    units = capacity // unit
    worth = np.where(2 * values < capacity, 2 * (values // unit), 2 * (units - (capacity - values) // unit))
    return np.where(2 * values == capacity, units, worth), 2 * units


def _bj1(values: np.ndarray, capacity: int, unit: int) -> tuple[np.ndarray, int]:
    """Rows are worth whole units, plus a share for a remainder that exceeds the remainder of the capacity."""
    over = capacity % unit
    return values // unit * (unit - over) + np.maximum(values % unit - over, 0), capacity // unit * (unit - over)
