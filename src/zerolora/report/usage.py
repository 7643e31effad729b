"""Predicted, requested and measured resources of training: time, rank-hours (GPU-hours on GPUs), memory, cost."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zerolora.units import byte_size, counted, gib

MIB = 1024**2


def usage(wanted: dict[str, Any], resources: dict[str, Any], accounted: dict[str, Any] | None) -> dict[str, Any]:
    """Return a flat dict of figures in seconds, hours and bytes, each named SOURCE_QUANTITY: `predicted_seconds`.

    wanted: `slurm_resources` of render.json. resources: train_resources.json of the last attempt. accounted: the
    scheduler's sums over all attempts (workflow/scripts/accounting.py), None without a scheduler. Host memory is per
    node; GPU memory is the highest peak of torch's allocator on any GPU.
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
    # The job's real limits: a profile may request resources other than those render computed.
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


def table(used: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns that have a figure, and the formatted cells of each row by title.

    A missing figure is an empty string. A quantity that is 0 everywhere, as GPU memory on CPUs, has no row.
    """
    known = {
        title: [used.get(f"{column}_{name}") for column in COLUMNS]
        for title, (name, _) in ROWS.items()
        if any(used.get(f"{column}_{name}") for column in COLUMNS)
    }
    shown = [index for index in range(len(COLUMNS)) if any(values[index] is not None for values in known.values())]
    cells = {
        title: ["" if (value := values[index]) is None else ROWS[title][1](value) for index in shown]
        for title, values in known.items()
    }
    return [COLUMNS[index] for index in shown], cells


class Figure(NamedTuple):
    """A figure of the page's section Cost."""

    label: str
    value: str
    note: str = ""


def cost(
    used: Mapping[str, Any], train: Mapping[str, Any], resources: Mapping[str, Any], adapter_bytes: int
) -> list[Figure]:
    """Return the cost of training: only the figures that apply and were measured.

    used: the result of `usage`. train, resources: train.json and train_resources.json.
    """
    on_gpu = bool(used["measured_gpu_bytes"])
    ranks = resources["ranks"]
    values = [
        Figure(
            "wall time of training",
            duration(used["measured_seconds"]),
            f"predicted {duration(used['predicted_seconds'])}; {train['steps']:,} steps, loading and saving included",
        ),
        Figure(
            "GPU hours" if on_gpu else "rank hours",
            f"{used['measured_rank_hours']:.3g}",
            counted(ranks, "GPU" if on_gpu else "CPU rank"),
        ),
        Figure("tokens per second", f"{resources['tokens_per_second']:,.0f}", f"{train['tokens']:,} tokens"),
    ]
    if resources.get("mfu"):
        values.append(Figure("MFU", f"{resources['mfu']:.1%}", f"{resources['tflops_per_second']:.3g} TFLOP/s a rank"))
    elif resources.get("tflops_per_second"):
        values.append(Figure("TFLOP/s of a rank", f"{resources['tflops_per_second']:.3g}"))
    if on_gpu:
        values.append(
            Figure("peak GPU memory", gib(used["measured_gpu_bytes"]), f"predicted {gib(used['predicted_gpu_bytes'])}")
        )
    values += [
        Figure("peak host memory", gib(used["measured_host_bytes"]), f"predicted {gib(used['predicted_host_bytes'])}"),
        Figure("what was trained", byte_size(adapter_bytes), f"{train['trainable_parameters']:,} parameters"),
    ]
    if resources.get("checkpoint_bytes"):
        values.append(Figure("a checkpoint", byte_size(resources["checkpoint_bytes"])))
    if resources.get("energy_joules"):
        values.append(Figure("energy of the GPUs", f"{resources['energy_joules'] / 3.6e6:.3g} kWh", "read by NVML"))
    return values


def ratios(used: Mapping[str, Any], predicted_step: float, measured_step: float) -> dict[str, float]:
    """Return measured over predicted by quantity."""
    result = {
        "wall time": used["measured_seconds"] / used["predicted_seconds"],
        "time of a step": measured_step / predicted_step,
    }
    for name, key in (("host memory", "host_bytes"), ("GPU memory", "gpu_bytes")):
        if used[f"measured_{key}"] and used[f"predicted_{key}"]:
            result[name] = used[f"measured_{key}"] / used[f"predicted_{key}"]
    return result


def duration(seconds: float) -> str:
    """Return seconds in their two largest units, as in 2 min 55 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, next_size, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // next_size} {next_unit}"
    raise AssertionError(seconds)
