"""jsonl: one JSON object for each step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.train.telemetry.trackers import StartedRun, Tracker


def _start(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    file = (folder / "steps.jsonl").open("w", encoding="utf-8")

    def log(step: int, values: Mapping[str, float]) -> None:
        file.write(json.dumps({"step": step, **values}) + "\n")

    return StartedRun(log, file.close)


TRACKER = Tracker(name="jsonl", about="one JSON object for each step, in steps.jsonl", package=None, start=_start)
