"""Weights & Biases, offline until `wandb sync`."""

import os
from pathlib import Path
from typing import Any

from zerolora.train.telemetry.trackers.tracker import PROJECT, StartedRun, Tracker


def _start(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    import wandb

    started = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, dir=str(folder), config=settings)
    return StartedRun(lambda step, values: started.log(dict(values), step=step), started.finish)


TRACKER = Tracker("wandb", "wandb", _start, {"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
