"""The packed rows of each global batch, and their assignment to ranks."""

import math

import numpy as np

from zerolora.schedules import rows_in

WINDOW = 50
"""Global batches within which rows are grouped by length, as transformers does (trainer_pt_utils.py,
get_length_grouped_indices). A larger window makes rows more alike and the order less random."""
ABSENT = -1
"""A place of a global batch that has no row: only the last one of a training may have fewer rows than places."""


def global_batches(
    work: np.ndarray, seed: int, global_batch: int, epochs: float, first: int | None = None, by_length: bool = False
) -> list[np.ndarray]:
    """Return the packed rows of every optimizer step, [global_batch] each, the last one's as many as are left.

    They depend only on the seed, the global batch and `by_length`. Each epoch is a shuffle of all rows; those left
    after its last whole global batch join the next epoch. A part of an epoch is the beginning of a whole one.

    `work` is each packed row's attention work, the sum of its squared row lengths. The packed row `first`, by default
    the one of most work, is in the first global batch: it needs most memory, so a run that does not fit fails at once.
    `by_length` sorts the rows within windows of WINDOW global batches by work before they are divided into global
    batches, and shuffles those: less padding, but batches of long rows follow batches of short ones.
    """
    first = int(work.argmax()) if first is None else first
    batches: list[np.ndarray] = []
    left = np.array([first])
    for epoch in range(math.ceil(epochs)):
        draw = np.random.default_rng([seed, epoch])
        shuffled = draw.permutation(len(work))
        rows = np.concatenate([left, shuffled if epoch else shuffled[shuffled != first]])
        whole = rows[: len(rows) // global_batch * global_batch].reshape(-1, global_batch)
        left = rows[whole.size :]
        batches.extend(_alike(whole, work, draw) if by_length else whole)
    if len(left):
        batches.append(left)
    if by_length:
        holding = next(number for number, batch in enumerate(batches) if first in batch)
        batches[0], batches[holding] = batches[holding], batches[0]
    rows_left = rows_in(len(work), epochs)
    batches = batches[: -(-rows_left // global_batch)]
    if batches:
        batches[-1] = batches[-1][: rows_left - (len(batches) - 1) * global_batch]
    return batches


def _alike(batches: np.ndarray, work: np.ndarray, draw: np.random.Generator) -> list[np.ndarray]:
    """Return global batches of the same rows, those of each of similar work."""
    result: list[np.ndarray] = []
    # Windows of similar size: rows of a short one would be less alike.
    for window in np.array_split(batches, max(1, -(-len(batches) // WINDOW))):
        order = np.argsort(-work[window], axis=None, kind="stable")
        result.extend(draw.permutation(window.ravel()[order].reshape(window.shape)))
    return result


def assign(work: np.ndarray, ranks: int, micro_batch: int, places: int | None = None) -> np.ndarray:
    """Return each rank's positions in a global batch of so many `places`, by default its rows: [accumulation, ranks,
    micro_batch], ABSENT at the end of a micro-batch that has fewer rows.

    Rows of similar work share a micro-step, since ranks may wait for each other at its end; within it the heaviest
    remaining row goes to the rank with the least work so far.
    """
    order = np.argsort(-work, kind="stable")
    groups = [order[position : position + 1] for position in range(len(order))]
    return _shared_out(groups, work, -(-(places or len(work)) // (ranks * micro_batch)), ranks, micro_batch)


def assign_padded(
    lengths: np.ndarray, supervised: np.ndarray, ranks: int, micro_batch: int, places: int | None = None
) -> np.ndarray:
    """Return the same for rows that are padded to the longest of their micro-batch: [accumulation, ranks, most rows].

    Micro-batches have neighbours by length and about as many positions each, padding included, so that there is little
    padding and ranks wait little: few long rows or many short ones. None has more positions than `micro_batch` rows of
    the longest one, or more `supervised` tokens than `micro_batch` times the most of a row, which is what the memory of
    a micro-batch is computed for.
    """
    order = np.argsort(-lengths, kind="stable")
    count = -(-(places or len(order)) // micro_batch)
    sums, most = np.concatenate([[0], supervised[order].cumsum()]), micro_batch * supervised.max()

    def cut(limit: int) -> list[int]:
        """Return the ends of micro-batches of at most so many positions."""
        ends = [0]
        while ends[-1] < len(order):
            start = ends[-1]
            end = min(start + limit // lengths[order[start]], np.searchsorted(sums, sums[start] + most, "right") - 1)
            ends.append(min(int(end), len(order)))
        return ends[1:]

    low, high = int(lengths.max()), micro_batch * int(lengths.max())
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= count else (middle + 1, high)
    groups = np.split(order, cut(low)[:-1])
    while len(groups) < min(count, len(order)):
        largest = max(groups, key=lambda group: (len(group) > 1, lengths[group[0]] * len(group)))
        number = next(index for index, group in enumerate(groups) if group is largest)
        groups[number : number + 1] = np.array_split(largest, 2)
    positions = np.array([lengths[group[0]] * len(group) for group in groups])
    groups = [groups[number] for number in np.argsort(-positions, kind="stable")]
    work = np.zeros(len(order))
    for group in groups:
        work[group] = lengths[group[0]]
    return _shared_out(groups, work, count // ranks, ranks, max(map(len, groups)), alone=True)


def _shared_out(
    groups: list[np.ndarray], work: np.ndarray, steps: int, ranks: int, most: int, alone: bool = False
) -> np.ndarray:
    """Return groups of rows as the micro-batches of `steps` micro-steps: [steps, ranks, most]. Each group goes to the
    rank with the least work so far, of those with room for it, or, `alone`, of those without one."""
    totals = [0.0] * ranks
    result = np.full((steps, ranks, most), ABSENT)
    rooms = ranks if alone else ranks * most
    for number, micro_step in enumerate(result):
        taken = [0] * ranks
        for group in groups[number * rooms : (number + 1) * rooms]:
            free = (rank for rank in range(ranks) if taken[rank] < (1 if alone else most))
            rank = min(free, key=totals.__getitem__)
            micro_step[rank, taken[rank] : taken[rank] + len(group)] = group
            taken[rank] += len(group)
            totals[rank] += float(work[group].sum())
    return result


def spread(amounts: np.ndarray, assigned: np.ndarray) -> float:
    """Return the spread of `amounts` [rows] over the ranks of a global batch: (most - least) / mean."""
    by_rank = np.where(assigned == ABSENT, 0, amounts[assigned]).sum(axis=(0, 2))
    return float((by_rank.max() - by_rank.min()) / by_rank.mean())
