"""Measure how much the ranks of a global batch differ, under training's order and under a plain shuffle.

    .venv/bin/python benchmarks/balance.py

100,000 rows of chat lengths (lognormal, mean 1,045 tokens), global batches of 64 packed rows of 4,096 tokens, or of 64
single rows, on 8 ranks with a micro-batch of 1. Spread is (most - least) / mean over the ranks. Writes
benchmarks/results/balance.json.
"""

import json
from typing import Any

import numpy as np
from measuring import RESULTS, machine

from zerolora.data.packing import pack
from zerolora.files import write_json
from zerolora.train.order import assign, global_batches, spread

ROWS, MEAN, SIGMA, CAPACITY, GLOBAL_BATCH, RANKS = 100_000, 1045, 0.8, 4096, 64, 8


def main() -> None:
    """Measure packed and single rows, in both orders."""
    lengths = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, ROWS)
    lengths = np.clip(lengths, 1, CAPACITY).astype(np.int64)
    packed = pack(lengths, CAPACITY)
    tokens = np.array([lengths[row].sum() for row in packed])
    work = np.array([(lengths[row] ** 2).sum() for row in packed])
    result = {
        "machine": machine(),
        "packed": {"zerolora": ours(tokens, work), "plain shuffle": shuffled(tokens, work)},
        "single rows": {"zerolora": ours(lengths, lengths**2), "plain shuffle": shuffled(lengths, lengths**2)},
    }
    write_json(RESULTS / "balance.json", result)
    print(json.dumps(result, indent=2))


def ours(tokens: np.ndarray, work: np.ndarray) -> dict[str, float]:
    """Return the spreads of training's order and assignment."""
    order = global_batches(work.astype(float), 0, GLOBAL_BATCH, 1)
    return spreads(tokens, work, [(batch, assign(work[batch].astype(float), RANKS, 1)) for batch in order])


def shuffled(tokens: np.ndarray, work: np.ndarray) -> dict[str, float]:
    """Return the spreads of a shuffle whose rows are assigned to the ranks in turn."""
    order = np.random.default_rng(0).permutation(len(work))[: len(work) // GLOBAL_BATCH * GLOBAL_BATCH]
    assigned = np.arange(GLOBAL_BATCH).reshape(-1, RANKS, 1)
    return spreads(tokens, work, [(batch, assigned) for batch in order.reshape(-1, GLOBAL_BATCH)])


def spreads(tokens: np.ndarray, work: np.ndarray, batches: list[Any]) -> dict[str, float]:
    """Return mean and worst spread of tokens and of attention work over global batches."""
    result: dict[str, float] = {}
    for name, amounts in (("tokens", tokens), ("attention", work)):
        values = [spread(amounts[batch], assigned) for batch, assigned in batches]
        result |= {f"{name}_mean": round(float(np.mean(values)), 5), f"{name}_worst": round(float(max(values)), 5)}
    return result


if __name__ == "__main__":
    main()
