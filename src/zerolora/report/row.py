"""The row of a run in the comparison of all runs: results/compare/rows/<run>.json, which the stage compare reads."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.settings import TrainingChoice
from zerolora.files import MANIFEST, read_json

POINTS = 100
"""Steps of a loss curve that a row keeps, evenly spaced."""
PARTS = ("data", "forward", "backward", "communication", "optimizer", "between")
"""Where a step's time goes, as in train_resources.json."""
LOADS = ("cpu_percent", "gpu_percent")
FIGURES = ("accuracy", "accuracy_low", "accuracy_high", "loss")
"""Of difference.json."""


class Planned(NamedTuple):
    """What was known of a run before it was trained."""

    estimate: Mapping[str, Any]
    """estimate.json."""
    choice: TrainingChoice
    """The entry `zerolora` of zero.json."""
    reasons: Mapping[str, Any]
    """render.json."""


def row(
    results: Path,
    planned: Planned,
    compared: Mapping[str, Any],
    trained: Mapping[str, Any],
    resources: Mapping[str, Any],
    used: Mapping[str, Any],
    failure: str | None,
    loss_unit: str,
) -> dict[str, Any]:
    """Return the row of the run in `results`: a flat table of figures, and what its charts show.

    compared: difference.json. trained, resources: train.json and train_resources.json. used: usage.json. failure: why
    the gate does not let the run pass. loss_unit: what the loss is a mean over, as in "per supervised token". Sizes are
    in bytes, times in seconds, energy in joules; what was not measured is left out.

        status, reason    done, or failed with the gate's reason
        strategy          and micro_batch, accumulation, as render chose them
        curve             [[step, training loss], …]
        memory            {gpu, host: predicted bytes by term, capacity_gpu, capacity_host}; none for a JSON of the
                          user's own, whose terms estimate.json does not have
        parts             seconds of a step by PARTS
    """
    rendered = planned.choice
    files = read_json(results / "adapter" / MANIFEST, "zerolora train")["files"]
    on_gpu = bool(used["predicted_gpu_bytes"])
    hours = used.get("accounted_rank_hours", used["measured_rank_hours"])
    step = resources["training_seconds"] / trained["steps"]
    result: dict[str, Any] = {
        "status": "failed" if failure else "done",
        "reason": failure or "; ".join(_remarks(compared, trained)),
        **{key: getattr(rendered, key) for key in ("strategy", "micro_batch", "accumulation")},
        **{name: compared[name] for name in FIGURES if name in compared},
        "steps": trained["steps"],
        "trainable_parameters": trained["trainable_parameters"],
        "loss_validation": trained["loss_validation"],
        "wall_seconds": resources["total_seconds"],
        "step_seconds": step,
        "predicted_step_seconds": planned.reasons["choice"]["ranked"][0]["step_seconds"],
        "tokens_per_second": resources["tokens_per_second"],
        **{name: resources[name] for name in ("mfu", "energy_joules", "checkpoint_bytes") if name in resources},
        **_loads(results / "metrics" / "telemetry.csv"),
        "predicted_host_bytes": used["predicted_host_bytes"],
        "measured_host_bytes": used["measured_host_bytes"],
        "communication_bytes": sum(size for name, size in resources.items() if name.endswith("_bytes_per_step")),
        "gpu_hours" if on_gpu else "rank_hours": hours,
        "adapter_bytes": sum(file["bytes"] for name, file in files.items() if name.endswith(".safetensors")),
        "loss_unit": loss_unit,
        "curve": _curve(results / "metrics" / "loss.csv"),
        "memory": _memory(planned.estimate, rendered.strategy),
        "parts": {part: resources[f"{part}_share"] * step for part in PARTS if f"{part}_share" in resources},
    }
    if on_gpu:
        result |= {name: used[name] for name in ("predicted_gpu_bytes", "measured_gpu_bytes")}
    return result


def _remarks(compared: Mapping[str, Any], trained: Mapping[str, Any]) -> Iterable[str]:
    if trained["steps"] < trained["planned_steps"]:
        yield f"stopped early, after {trained['steps']} of {trained['planned_steps']} steps"
    if not compared.get("enabled", True):
        yield "not evaluated: evaluate.enabled is false"


def _loads(telemetry: Path) -> dict[str, float]:
    """Return the means of LOADS over the time of all steps."""
    means = {}
    with telemetry.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    for name in LOADS:
        read = [(float(line[name]), float(line["seconds"])) for line in lines if line[name] and line["seconds"]]
        if read:
            means[name] = sum(load * seconds for load, seconds in read) / sum(seconds for _, seconds in read)
    return means


def _curve(table: Path) -> list[tuple[int, float]]:
    with table.open(encoding="utf-8", newline="") as file:
        points = [(int(line["step"]), float(line["loss"])) for line in csv.DictReader(file)]
    count = min(POINTS, len(points))
    places = {round(place * (len(points) - 1) / max(1, count - 1)) for place in range(count)}
    return [points[place] for place in sorted(places)]


def _memory(predicted: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    for entry in predicted["strategies"]:
        if entry["strategy"] == strategy:
            terms = {where: _terms(entry[where]) for where in ("gpu", "host")}
            return {**terms, **{f"capacity_{where}": predicted["capacity"][where] for where in terms}}
    return {}


def _terms(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the terms that are there; activations can be negative, where they use memory counted for gradients."""
    left_out = ("total", "model_states", "peak_phase")
    return {name: value for name, value in entry.items() if name not in left_out and value > 0}
