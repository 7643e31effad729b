"""TensorBoard: event files, written through torch."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.train.telemetry.trackers.tracker import StartedRun, Tracker


def _start(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder)  # it would show the steps of every attempt
    writer = SummaryWriter(str(folder))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return StartedRun(log, writer.close)


TRACKER = Tracker("tensorboard", "tensorboard", _start)
