"""The packed rows of each global batch, and their assignment to ranks."""

import math

import numpy as np

from zerolora.schedules import steps_in

WINDOW = 50
"""Global batches within which rows are grouped by work, as transformers groups by length (trainer_pt_utils.py,
get_length_grouped_indices). A larger window makes rows more alike and the order less random."""


def global_batches(
    work: np.ndarray, seed: int, global_batch: int, epochs: float, first: int | None = None
) -> np.ndarray:
    """Return the packed rows of every optimizer step, [steps, global_batch]; they depend only on seed and global batch.

    `work` is each packed row's attention work, the sum of its squared row lengths. Each epoch is a shuffle; within
    windows of WINDOW global batches rows are sorted by work and split into global batches, and those are shuffled. So
    the rows of a global batch are similar, and ranks wait little for each other. The global batch of the packed row
    `first`, by default the one of most work, comes first: that row needs most memory, so a run that does not fit fails
    at once. Rows left after the last whole global batch of an epoch join the next epoch; those of the last are unused.
    A part of an epoch is the beginning of a whole one.
    """
    first = int(work.argmax()) if first is None else first
    steps = [np.zeros((0, global_batch), dtype=np.int64)]
    left = np.array([first])
    for epoch in range(math.ceil(epochs)):
        draw = np.random.default_rng([seed, epoch])
        shuffled = draw.permutation(len(work))
        rows = np.concatenate([left, shuffled if epoch else shuffled[shuffled != first]])
        whole = rows[: len(rows) // global_batch * global_batch].reshape(-1, global_batch)
        # Windows of similar size: rows of a short one would be less alike.
        for window in np.array_split(whole, max(1, -(-len(whole) // WINDOW))):
            order = np.argsort(-work[window], axis=None, kind="stable")
            steps.append(draw.permutation(window.ravel()[order].reshape(-1, global_batch)))
        left = rows[whole.size :]
    result = np.concatenate(steps)
    if len(result):
        holding = int((result[:WINDOW] == first).any(1).argmax())
        result[[0, holding]] = result[[holding, 0]]
    return result[: steps_in(len(work), epochs, global_batch)]


def assign(work: np.ndarray, ranks: int, micro_batch: int) -> np.ndarray:
    """Return each rank's positions in a global batch: [accumulation, ranks, micro_batch].

    Rows of similar work share a micro-step, since ranks may wait for each other at its end; within it the heaviest
    remaining row goes to the rank with the least work so far.
    """
    order = np.argsort(-work, kind="stable")
    totals = [0.0] * ranks
    assigned: list[list[list[int]]] = []
    for start in range(0, len(work), ranks * micro_batch):
        step: list[list[int]] = [[] for _ in range(ranks)]
        for position in order[start : start + ranks * micro_batch].tolist():
            rank = min((rank for rank in range(ranks) if len(step[rank]) < micro_batch), key=totals.__getitem__)
            step[rank].append(position)
            totals[rank] += float(work[position])
        assigned.append(step)
    return np.array(assigned)


def spread(amounts: np.ndarray, assigned: np.ndarray) -> float:
    """Return the spread of `amounts` [rows] over the ranks of a global batch: (most - least) / mean."""
    by_rank = amounts[assigned].sum(axis=(0, 2))
    return float((by_rank.max() - by_rank.min()) / by_rank.mean())
