"""SwanLab, offline until `swanlab sync`."""

import os
from pathlib import Path
from typing import Any

from zerolora.train.telemetry.trackers.tracker import PROJECT, StartedRun, Tracker


def _start(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    import swanlab

    project = os.environ.get("SWANLAB_PROJ_NAME", PROJECT)
    swanlab.init(project=project, name=run, log_dir=str(folder), config=settings)
    return StartedRun(lambda step, values: swanlab.log(dict(values), step=step), swanlab.finish)


TRACKER = Tracker("swanlab", "swanlab", _start, {"SWANLAB_MODE": "offline"})
