"""Predicted, requested and actual resource usage of training: time, rank-hours (GPU-hours on GPUs), memory."""

from collections.abc import Callable
from typing import Any

from zerolora.units import gib

MIB = 1024**2


def usage(wanted: dict[str, Any], resources: dict[str, Any], accounted: dict[str, Any] | None) -> dict[str, Any]:
    """Return a flat dict of figures in seconds, hours and bytes, each named SOURCE_QUANTITY: `predicted_seconds`.

    wanted: `slurm_resources` of render.json. resources: train_resources.json, of the last attempt. accounted: the
    scheduler's sums over all attempts (workflow/scripts/accounting.py), None without a scheduler. Host memory is that
    of one node; GPU memory is the highest peak of torch's allocator on any GPU.
    """
    nodes, ranks = wanted["nodes"], wanted["ranks"]
    result = {
        "predicted_seconds": wanted["seconds"],
        "predicted_rank_hours": ranks * wanted["seconds"] / 3600,
        "predicted_host_bytes": wanted["host_bytes"],
        "predicted_gpu_bytes": wanted["gpu_bytes"],
        "asked_seconds": 60 * wanted["minutes"],
        "asked_host_bytes": wanted["mem_mib"] * MIB,
        "measured_seconds": resources["total_seconds"],
        "measured_rank_hours": ranks * resources["total_seconds"] / 3600,
        "measured_host_bytes": resources["peak_host_bytes_worst_rank"] * ranks // nodes,
        "measured_gpu_bytes": resources["peak_gpu_bytes_worst_rank"],
    }
    if accounted is None:
        return result
    # The job's real limits: a profile may request other resources than render computed.
    limits = {"asked_seconds": accounted["limit_seconds"], "asked_host_bytes": accounted["limit_host_bytes"]}
    rank_seconds = accounted["gpu_seconds"] or ranks * accounted["seconds"]
    return (
        result
        | {name: value for name, value in limits.items() if value}
        | {
            "accounted_jobs": accounted["jobs"],
            "accounted_seconds": accounted["seconds"],
            "accounted_rank_hours": rank_seconds / 3600,
            "accounted_host_bytes": accounted["host_bytes"],
        }
    )


COLUMNS = ("predicted", "asked", "measured", "accounted")
ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "wall time": ("seconds", lambda value: f"{value:,.0f} s"),
    "rank-hours": ("rank_hours", lambda value: f"{value:.4g}"),
    "host memory of a node": ("host_bytes", gib),
    "GPU memory": ("gpu_bytes", gib),
}


def table(found: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns that have a figure, and {row title: one formatted cell for each of them}; unknown values are
    empty strings. A quantity that is 0 everywhere, as GPU memory on CPUs, has no row."""
    known = {
        title: [found.get(f"{column}_{name}") for column in COLUMNS]
        for title, (name, _) in ROWS.items()
        if any(found.get(f"{column}_{name}") for column in COLUMNS)
    }
    columns = [place for place in range(len(COLUMNS)) if any(cells[place] is not None for cells in known.values())]
    cells = {
        title: ["" if (value := values[place]) is None else ROWS[title][1](value) for place in columns]
        for title, values in known.items()
    }
    return [COLUMNS[place] for place in columns], cells
