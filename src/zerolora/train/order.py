"""Which packed rows share a global batch, and which rank takes which of them."""

import numpy as np

WINDOW = 50  # global batches within which rows of like work are brought together


def global_batches(work: np.ndarray, seed: int, global_batch: int, epochs: int) -> np.ndarray:
    """Return the packed rows of every optimizer step, [steps, global_batch], by seed and global batch alone.

    `work` is each packed row's attention work, the sum of its squared row lengths. Each epoch is a shuffle; within
    windows of WINDOW global batches rows are sorted by work and cut into global batches, and those are shuffled. So
    the rows of a global batch are alike, and ranks wait little for each other. The heaviest comes first: what does
    not fit fails at once. Rows left over after the last whole global batch are not seen.
    """
    draw = [np.random.default_rng([seed, epoch]) for epoch in range(epochs)]
    order = np.concatenate([generator.permutation(len(work)) for generator in draw])
    order = order[: len(order) // global_batch * global_batch]
    steps = []
    for start in range(0, len(order), WINDOW * global_batch):
        window = order[start : start + WINDOW * global_batch]
        alike = window[np.argsort(-work[window], kind="stable")].reshape(-1, global_batch)
        steps.append(draw[0].permutation(alike))
    if not steps:
        return np.zeros((0, global_batch), dtype=np.int64)
    result = np.concatenate(steps)
    heaviest = int(work[result].max(1).argmax())
    result[[0, heaviest]] = result[[heaviest, 0]]
    return result


def deal(work: np.ndarray, ranks: int, micro_batch: int) -> np.ndarray:
    """Return the places in a global batch, [accumulation, ranks, micro_batch], that each rank takes in each micro-step.

    Rows of like work share a micro-step, at whose end ranks may wait for each other; in it the heaviest row left goes
    to the rank that has done the least so far.
    """
    order = np.argsort(-work, kind="stable")
    done = [0.0] * ranks
    dealt: list[list[list[int]]] = []
    for start in range(0, len(work), ranks * micro_batch):
        step: list[list[int]] = [[] for _ in range(ranks)]
        for place in order[start : start + ranks * micro_batch].tolist():
            rank = min((rank for rank in range(ranks) if len(step[rank]) < micro_batch), key=done.__getitem__)
            step[rank].append(place)
            done[rank] += float(work[place])
        dealt.append(step)
    return np.array(dealt)


def spread(amounts: np.ndarray, dealt: np.ndarray) -> float:
    """Return by how much the ranks of a global batch differ: (most - least) / mean of `amounts` [rows]."""
    by_rank = amounts[dealt].sum(axis=(0, 2))
    return float((by_rank.max() - by_rank.min()) / by_rank.mean())
