"""Compare packers: how many packed rows they need, against the proven least, and for how long they take.

    .venv/bin/python benchmarks/packing.py

Lengths of eighteen kinds, drawn by a seed; seconds of one core. TRL packs 1,000 rows at a time, as its trainer
calls it; its seconds hold the copying of tokens (here of one byte each). First-fit takes rows as they come. Then
100,000 and 1,000,000 rows for the time and memory of ours alone. Writes benchmarks/results/packing.json and
packing.svg, prints Markdown. Takes about five minutes and 4 GiB.
"""

import importlib.metadata
import os
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from zerolora.data.packing import pack
from zerolora.data.packing_bound import lower_bound
from zerolora.files import write_json

RESULT = Path("benchmarks/results/packing.json")
CHART = RESULT.with_suffix(".svg")
REPEATS = 3  # the least time of so many counts
WINDOW = 1000  # rows that TRL sees at a time: the default batch of datasets.map


def lognormal(mean: float, sigma: float) -> Callable[..., np.ndarray]:
    """Return a draw of lengths with a mean and a sigma of the logarithm; `pack` sees them cut to the capacity."""
    return lambda random, rows, capacity: random.lognormal(np.log(mean) - sigma**2 / 2, sigma, rows)


def uniform(low: float, high: float) -> Callable[..., np.ndarray]:
    """Return a draw of lengths between two shares of the capacity."""
    return lambda random, rows, capacity: random.integers(round(low * capacity), round(high * capacity) + 1, rows)


def mixed(*parts: tuple[float, Callable[..., np.ndarray]]) -> Callable[..., np.ndarray]:
    """Return a draw of which each part has its share, in any order."""
    return lambda random, rows, capacity: random.permutation(
        np.concatenate([drawn(random, round(share * rows), capacity) for share, drawn in parts])
    )


# What the lengths are like, how many rows, the capacity. A test holds the packer to 99.75 % full on the first six.
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
    """Measure everything, write it down, draw it."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sets = [measured(name) for name in SETS]
    result = {
        "machine": machine() | {"cores_used": 1},
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "datasets", "pyarrow", "trl")},
        "sets": sets,
        "growth": [grown(rows) for rows in (100_000, 1_000_000)],
    }
    write_json(RESULT, result)
    draw(sets)
    print(table(sets))
    for entry in result["growth"]:
        print(entry)


def lengths(name: str, rows: int | None = None) -> tuple[np.ndarray, int]:
    """Return a set's lengths [rows], the same in every call, and its capacity."""
    drawn, usual, capacity = SETS[name]
    random = np.random.default_rng(list(SETS).index(name))
    return np.clip(drawn(random, rows or usual, capacity).astype(np.int64), 1, capacity), capacity


def measured(name: str) -> dict[str, Any]:
    """Return what every packer makes of a set."""
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
    """Return time and memory of our packer for so many rows of chat; memory in a run of its own, which it slows."""
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
    """Return the seconds of processor time that a call takes, and its result: on a busy machine they stay the same."""
    started = time.process_time()
    result = function(*arguments, **named)
    return time.process_time() - started, result


def zerolora(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Return the seconds, and the tokens in each packed row; so do all packers."""
    seconds, packed = timed(pack, tokens, capacity)
    assert sorted(row for rows in packed for row in rows) == list(range(len(tokens)))
    return seconds, [int(tokens[rows].sum()) for rows in packed]


def trl(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """TRL's own packer, on a data set of rows of these lengths."""
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
    """All rows from the longest, each into the fullest packed row that has room for it."""
    return timed(lambda: best_fit(sorted(tokens.tolist(), reverse=True), capacity))


def windowed_best_fit(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Best-fit decreasing on WINDOW rows after the other: TRL's packing without its copying."""
    rows = tokens.tolist()
    windows = [rows[start : start + WINDOW] for start in range(0, len(rows), WINDOW)]
    return timed(lambda: [held for window in windows for held in best_fit(sorted(window, reverse=True), capacity)])


def first_fit_decreasing(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """All rows from the longest, each into the first packed row that has room for it."""
    return timed(lambda: first_fit(sorted(tokens.tolist(), reverse=True), capacity))


def first_fit_as_they_come(tokens: np.ndarray, capacity: int) -> tuple[float, list[int]]:
    """Rows as they come, each into the first packed row that has room for it."""
    return timed(first_fit, tokens.tolist(), capacity)


def best_fit(rows: Iterable[int], capacity: int) -> list[int]:
    """Return the tokens in each packed row. Bit s of a set says that a packed row has s tokens free."""
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
    """Return the tokens in each packed row. A tree of the most free tokens finds the first packed row in log2 steps."""
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
    "first-fit": first_fit_as_they_come,
}


def table(sets: list[dict[str, Any]]) -> str:
    """Return Markdown: of each packer the share of the proven least, and its seconds."""
    lines = [
        f"| lengths | rows | capacity | least | {' | '.join(PACKERS)} |",
        f"|---|{'---:|' * (3 + len(PACKERS))}",
    ]
    for entry in sets:
        cells = [f"{made['share_of_bound']:.2%}, {made['seconds']:.2f} s" for made in entry["packers"].values()]
        numbers = [f"{entry[key]:,}" for key in ("rows", "capacity", "lower_bound")]
        lines.append(f"| {' | '.join([entry['set'], *numbers, *cells])} |")
    return "\n".join(lines)


def draw(sets: list[dict[str, Any]]) -> None:
    """Write the chart: how near each packer comes to the proven least, on every set."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "zerolora"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6.5), layout="constrained")
    for packer, marker in reversed([*zip(PACKERS, "os^vDX", strict=True)]):
        shares = [100 * entry["packers"][packer]["share_of_bound"] for entry in sets]
        axes.scatter(shares, range(len(sets)), s=70 if packer == "zerolora" else 30, marker=marker, label=packer)
    axes.set_yticks(range(len(sets)), [entry["set"] for entry in sets])
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_xlabel("share of the proven least number of packed rows, %")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(CHART, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
