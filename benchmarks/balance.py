"""Measure how much the ranks of a global batch differ, and the share of padding, in each order of the rows.

    .venv/bin/python benchmarks/balance.py

100,000 rows of chat lengths (lognormal, mean 1,045 tokens), global batches of 64 packed rows of 4,096 tokens, or of 64
single rows, on 8 ranks, the latter with a micro-batch of 1 and of 4. Spread is (most - least) / mean over the ranks.
"in turn" is a plain shuffle whose rows are assigned to ranks and micro-batches in their order. Writes
benchmarks/results/balance.json.
"""

import json
from typing import Any

import numpy as np
from measuring import RESULTS, machine

from zerolora.data.packing import pack
from zerolora.files import write_json
from zerolora.train.order import ABSENT, assign, assign_padded, global_batches, spread

ROWS, MEAN, SIGMA, CAPACITY, GLOBAL_BATCH, RANKS = 100_000, 1045, 0.8, 4096, 64, 8
MICRO_BATCHES = {"packed": (1,), "single rows": (1, 4)}


def main() -> None:
    """Measure packed and single rows."""
    lengths = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, ROWS)
    lengths = np.clip(lengths, 1, CAPACITY).astype(np.int64)
    packed = pack(lengths, CAPACITY)
    tokens = np.array([lengths[row].sum() for row in packed])
    work = np.array([(lengths[row] ** 2).sum() for row in packed])
    result: dict[str, Any] = {"machine": machine()}
    for kind, of_rows in {"packed": (tokens, work), "single rows": (lengths, lengths**2)}.items():
        result[kind] = {str(micro): orders(*of_rows, micro, kind != "packed") for micro in MICRO_BATCHES[kind]}
    write_json(RESULTS / "balance.json", result)
    print(json.dumps(result, indent=2))


def orders(tokens: np.ndarray, work: np.ndarray, micro_batch: int, padded: bool) -> dict[str, dict[str, float]]:
    """Return the figures of a plain shuffle in turn, of training's order, and of rows grouped by length."""
    amounts = work.astype(float)
    whole = len(work) // GLOBAL_BATCH  # the last, smaller global batch is not compared
    shuffled, grouped = (
        global_batches(amounts, 0, GLOBAL_BATCH, 1, by_length=by_length)[:whole] for by_length in (False, True)
    )
    in_turn = np.arange(GLOBAL_BATCH).reshape(-1, RANKS, micro_batch)

    def assigned(batch: np.ndarray) -> np.ndarray:
        if padded:
            return assign_padded(tokens[batch], tokens[batch], RANKS, micro_batch)
        return assign(amounts[batch], RANKS, micro_batch)

    return {
        "in turn": figures(tokens, work, [(batch, in_turn) for batch in shuffled]),
        "zerolora": figures(tokens, work, [(batch, assigned(batch)) for batch in shuffled]),
        "group_by_length": figures(tokens, work, [(batch, assigned(batch)) for batch in grouped]),
    }


def figures(tokens: np.ndarray, work: np.ndarray, batches: list[Any]) -> dict[str, float]:
    """Return mean and worst spread of tokens and of attention work over global batches, the share of padding, and the
    positions of the slowest rank of each micro-step over those of ranks with equal shares of the tokens."""
    result: dict[str, float] = {}
    for name, amounts in (("tokens", tokens), ("attention", work)):
        values = [spread(amounts[batch], assigned) for batch, assigned in batches]
        result |= {f"{name}_mean": round(float(np.mean(values)), 5), f"{name}_worst": round(float(max(values)), 5)}
    # Each micro-step takes as long as its largest micro-batch, padded to its longest row.
    padded = [
        np.where(assigned == ABSENT, 0, tokens[batch][assigned]).max(2) * (assigned != ABSENT).sum(2)
        for batch, assigned in batches
    ]
    computed, real = sum(each.sum() for each in padded), sum(tokens[batch].sum() for batch, _ in batches)
    waited = sum(each.max(1).sum() for each in padded) * RANKS
    return result | {
        "padding": round(1 - float(real / computed), 5),
        "slowest": round(float(waited / real), 5),
    }


if __name__ == "__main__":
    main()
