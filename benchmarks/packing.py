"""Compare packers: the number of their packed rows against a proven lower bound, and their seconds of one core.

    .venv/bin/python benchmarks/packing.py

Lengths come from eighteen seeded distributions. TRL packs 1,000 rows at a time, as its trainer calls it; its seconds
include copying the tokens (here of one byte each). First-fit takes the rows in order. Then our packer alone packs
100,000 and 1,000,000 rows, for its time and memory. Writes benchmarks/results/packing.json, prints Markdown. Takes
about five minutes and 4 GiB.
"""

import os
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from measuring import RESULTS, machine, table

from zerolora.data.packing import pack
from zerolora.data.packing_bound import lower_bound
from zerolora.files import write_json

REPEATS = 3  # the fastest counts
WINDOW = 1000  # rows that TRL packs at a time: the default batch of datasets.map


def lognormal(mean: float, sigma: float) -> Callable[..., np.ndarray]:
    """Return a lognormal distribution of lengths; `lengths` clips them to the capacity."""
    return lambda random, rows, capacity: random.lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)


def uniform(low: float, high: float) -> Callable[..., np.ndarray]:
    """Return a distribution of lengths between two shares of the capacity."""
    return lambda random, rows, capacity: random.integers(round(low * capacity), round(high * capacity) + 1, rows)


def mixed(*parts: tuple[float, Callable[..., np.ndarray]]) -> Callable[..., np.ndarray]:
    """Return a mixture of distributions by their shares, shuffled."""
    return lambda random, rows, capacity: random.permutation(
        np.concatenate([drawn(random, round(share * rows), capacity) for share, drawn in parts])
    )


# Distribution of lengths, number of rows, capacity.
SETS: dict[str, tuple[Callable[..., np.ndarray], int, int]] = {
    "instructions, at 2048": (lognormal(150, 0.6), 52_000, 2048),
    "instructions, at 4096": (lognormal(150, 0.6), 52_000, 4096),
    "chat, at 4096": (lognormal(1045, 1.0), 100_000, 4096),
    "chat, at 8192": (lognormal(1045, 1.0), 100_000, 8192),
    "long, at 4096": (lognormal(2228, 0.8), 50_000, 4096),
    "uniform 0.2-0.7": (uniform(0.2, 0.7), 50_000, 4096),
    "chat of like length": (lognormal(1045, 0.3), 100_000, 4096),
    "long of like length": (lognormal(2228, 0.5), 50_000, 4096),
    "half instructions, half long": (mixed((0.5, lognormal(150, 0.6)), (0.5, lognormal(2228, 0.6))), 80_000, 4096),
    "two peaks": (
        mixed(
            (0.7, lambda random, rows, _: random.normal(400, 80, rows)),
            (0.3, lambda random, rows, _: random.normal(2600, 300, rows)),
        ),
        50_000,
        4096,
    ),
    "exponential": (lambda random, rows, _: random.exponential(700, rows), 100_000, 4096),
    "uniform 0.1-0.9": (uniform(0.1, 0.9), 50_000, 4096),
    "uniform 0.34-0.5": (uniform(0.34, 0.5), 50_000, 4096),
    "uniform 0.26-0.5": (uniform(0.26, 0.5), 50_000, 4096),
    "all over half": (uniform(0.501, 1), 50_000, 4096),
    "all 600": (lambda random, rows, _: np.full(rows, 600), 50_000, 4096),
    "documents, at 131072": (lognormal(6000, 1.2), 50_000, 131_072),
    "uniform 0.1-0.9, at 131072": (uniform(0.1, 0.9), 20_000, 131_072),
}


def main() -> None:
    """Measure, write, print the table."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    about = machine(("numpy", "datasets", "pyarrow", "trl"))
    sets = [measured(name) for name in SETS]
    result = {
        "machine": about | {"cores_used": 1},
        "sets": sets,
        "growth": [grown(rows) for rows in (100_000, 1_000_000)],
    }
    write_json(RESULTS / "packing.json", result)
    print(markdown(sets), *result["growth"], sep="\n")


def lengths(name: str, rows: int | None = None) -> tuple[np.ndarray, int]:
    """Return the lengths [rows] of a set, equal in every call, and its capacity."""
    drawn, usual, capacity = SETS[name]
    random = np.random.default_rng(list(SETS).index(name))
    return np.clip(drawn(random, rows or usual, capacity).astype(np.int64), 1, capacity), capacity


def measured(name: str) -> dict[str, Any]:
    """Return the figures of every packer on a set."""
    tokens, capacity = lengths(name)
    bound, total = lower_bound(tokens, capacity), int(tokens.sum())
    packers = {}
    for packer, measure in PACKERS.items():
        runs = [measure(tokens, capacity) for _ in range(REPEATS)]
        held = runs[0][1]
        assert sum(held) == total and max(held) <= capacity and len(held) >= bound
        packers[packer] = {
            "packed_rows": len(held),
            "efficiency": round(total / len(held) / capacity, 6),
            "share_of_bound": round(bound / len(held), 6),
            "seconds": round(min(seconds for seconds, _ in runs), 3),
        }
    entry = {"set": name, "rows": len(tokens), "capacity": capacity, "tokens": total, "lower_bound": bound}
    print(entry, packers, flush=True)
    return {**entry, "packers": packers}


def grown(rows: int) -> dict[str, Any]:
    """Return time and memory of our packer for so many rows of chat; the run that traces memory is not timed."""
    tokens, capacity = lengths("chat, at 4096", rows)
    seconds = min(zerolora(tokens, capacity)[0] for _ in range(REPEATS))
    tracemalloc.start()
    packed = pack(tokens, capacity)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "rows": rows,
        "capacity": capacity,
        "packed_rows": len(packed),
        "share_of_bound": round(lower_bound(tokens, capacity) / len(packed), 6),
        "seconds": round(seconds, 3),
        "peak_bytes": peak,
        "peak_bytes_per_row": round(peak / rows),
    }


def timed(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[float, Any]:
    """Return the CPU seconds of a call, which other processes hardly disturb, and its result."""
    started = time.process_time()
    result = function(*arguments, **named)
    return time.process_time() - started, result


def zerolora(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Return the seconds and the tokens in each packed row, as all packers do."""
    seconds, packed = timed(pack, tokens, capacity)
    assert sorted(row for rows in packed for row in rows) == list(range(len(tokens)))
    return seconds, [int(tokens[rows].sum()) for rows in packed]


def trl(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Pack with TRL's packer, on a data set of rows of these lengths."""
    import pyarrow
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from trl.data_utils import pack_dataset

    disable_progress_bar()
    starts = pyarrow.array(np.concatenate([[0], np.cumsum(tokens)]), pyarrow.int64())
    rows = pyarrow.LargeListArray.from_arrays(starts, pyarrow.array(np.zeros(tokens.sum(), np.int8)))
    dataset = Dataset(pyarrow.table({"input_ids": rows}))
    seconds, packed = timed(pack_dataset, dataset, seq_length=capacity, strategy="bfd")
    return seconds, [sum(held) for held in packed["seq_lengths"]]


def best_fit_decreasing(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Add rows, longest first, to the fullest packed row with room."""
    return timed(lambda: best_fit(sorted(tokens.tolist(), reverse=True), capacity))


def windowed_best_fit(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Apply best-fit decreasing to WINDOW rows at a time: TRL's packing without its copying."""
    rows = tokens.tolist()
    windows = [rows[start : start + WINDOW] for start in range(0, len(rows), WINDOW)]
    return timed(lambda: [held for window in windows for held in best_fit(sorted(window, reverse=True), capacity)])


def first_fit_decreasing(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Add rows, longest first, to the first packed row with room."""
    return timed(lambda: first_fit(sorted(tokens.tolist(), reverse=True), capacity))


def first_fit_in_order(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Add rows in order to the first packed row with room."""
    return timed(first_fit, tokens.tolist(), capacity)


def best_fit(rows: Iterable[int], capacity: int) -> list[int]:
    """Return the tokens in each packed row. Bit s of `free` is set if a packed row has s free tokens."""
    free, packed_rows = 0, [0] * (capacity + 1)
    for row in rows:
        fitting = free >> row
        room = row + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            packed_rows[room] -= 1
            if not packed_rows[room]:
                free ^= 1 << room
        packed_rows[room - row] += 1
        free |= 1 << (room - row)
    return [capacity - room for room, count in enumerate(packed_rows) for _ in range(count)]


def first_fit(rows: list[int], capacity: int) -> list[int]:
    """Return the tokens in each packed row. A tree of the most free tokens leads to the first one in log2 steps."""
    size = 1 << (len(rows) - 1).bit_length()
    most = [capacity] * (2 * size)
    for row in rows:
        node = 1
        while node < size:
            node *= 2
            if most[node] < row:
                node += 1
        most[node] -= row
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return [capacity - room for room in most[size:] if room < capacity]


PACKERS: dict[str, Callable[[np.ndarray, int], tuple[float, list[int]]]] = {
    "zerolora": zerolora,
    "TRL bfd": trl,
    "best-fit decreasing": best_fit_decreasing,
    "first-fit decreasing": first_fit_decreasing,
    "best-fit, 1,000 rows at a time": windowed_best_fit,
    "first-fit": first_fit_in_order,
}


def markdown(sets: list[dict[str, Any]]) -> str:
    """Return the share of the lower bound and the seconds of each packer."""
    rows = [
        [entry["set"], *(f"{entry[key]:,}" for key in ("rows", "capacity", "lower_bound"))]
        + [f"{made['share_of_bound']:.2%}, {made['seconds']:.2f} s" for made in entry["packers"].values()]
        for entry in sets
    ]
    return table(["lengths", "rows", "capacity", "lower bound", *PACKERS], rows, right=3 + len(PACKERS))


if __name__ == "__main__":
    main()
