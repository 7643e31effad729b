"""What a run has cost, as the page shows it: only what applies and was measured."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from zerolora.units import byte_size, gib


class Figure(NamedTuple):
    """A figure that stands out, with its words."""

    label: str
    value: str
    note: str = ""


def figures(
    used: Mapping[str, Any], train: Mapping[str, Any], resources: Mapping[str, Any], adapter: int
) -> list[Figure]:
    """Return what training has cost.

    used: the result of `usage.usage`. train, resources: train.json and train_resources.json. adapter: bytes of what was
    trained.
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
            f"{ranks} {'GPU' if on_gpu else 'CPU rank'}{'s' * (ranks > 1)}",
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
        Figure("what was trained", byte_size(adapter), f"{train['trainable_parameters']:,} parameters"),
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
    """Return seconds in the two largest units that they fill, as in 2 min 55 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, next_size, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // next_size} {next_unit}"
    raise AssertionError(seconds)
