"""Rows of a comparison, as written by report."""

import json
from pathlib import Path
from typing import Any

from zerolora.config.grids import Shared
from zerolora.files import write_json

GIB = 2**30


def row(place: int = 0, **values: Any) -> dict[str, Any]:
    """Return the row of a finished run on a CPU; a larger `place` is slower and smaller."""
    step = 1.0 + place
    return {
        "status": "done",
        "reason": "",
        "strategy": "zero2",
        "micro_batch": 4,
        "accumulation": 1,
        "accuracy": 0.9 - place / 100,
        "accuracy_low": 0.85,
        "accuracy_high": 0.95,
        "loss": 0.5 + place,
        "loss_validation": 0.6,
        "steps": 100,
        "trainable_parameters": 2_442_240,
        "wall_seconds": 175.2,
        "step_seconds": step,
        "predicted_step_seconds": 1.5,
        "tokens_per_second": 295.3,
        "cpu_percent": 98.9,
        "predicted_host_bytes": 3 * GIB,
        "measured_host_bytes": (4 - place / 10) * GIB,
        "communication_bytes": 19_537_956,
        "rank_hours": 0.0973,
        "adapter_bytes": 9_823_216,
        "checkpoint_bytes": 29_400_000,
        "loss_unit": "per supervised token",
        "curve": [[1, 4.8], [50, 0.1], [100, 0.001]],
        "memory": {"host": {"processes": 1.2 * GIB, "ranks": GIB}, "gpu": {}, "capacity_host": 24 * GIB},
        "parts": {"forward": step / 2, "backward": step / 3, "communication": step / 6},
        **values,
    }


GPU = {
    "mfu": 0.41,
    "gpu_percent": 97.0,
    "predicted_gpu_bytes": 60 * GIB,
    "measured_gpu_bytes": 61 * GIB,
    "gpu_hours": 3.2,
    "energy_joules": 4.1e6,
}


def results_of(folder: Path, rows: dict[str, dict[str, Any]], runs: list[str] | None = None, **overrides: Any) -> Path:
    """Write a results directory with these rows and a config with these runs, by default those of the rows."""
    for name, each in rows.items():
        write_json(folder / f"compare/rows/{name}.json", each)
    names = sorted(runs or rows)
    config = {
        "prepare": {"rows": {"model": "tiny"}},
        "compare": {"runs": {name: overrides.get(name, {}) for name in names}},
    }
    write_json(folder / "config.json", config)
    settings = {"dataset": "rows", "render": {"strategy": "zero3"}, "report": {"tasks": ["sums"]}}
    write_settings(folder, {name: settings | dict.fromkeys(Shared._fields, name) for name in names})
    return folder


def write_settings(results: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Write the settings of runs like `zerolora stage resolve`."""
    for name, settings in runs.items():
        write_json(results / f"settings/runs/{name}.json", {"runs": {name: settings}})
    write_json(results / "settings/manifest.json", {"files": {f"runs/{name}.json": {} for name in runs}})


def settings_of(results: Path) -> str:
    """Return --settings of the stage compare."""
    return json.dumps(json.loads((results / "config.json").read_text())["compare"])
