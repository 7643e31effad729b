"""DVCLive: files that `dvc plots` draws."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.train.telemetry.trackers.tracker import StartedRun, Tracker


def _start(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    from dvclive import Live

    # The pipeline's own dvc.yaml lists metrics and plots, and its commits are the experiments.
    live = Live(str(folder), dvcyaml=False, save_dvc_exp=False, report=None)
    live.log_params(settings)

    def log(step: int, values: Mapping[str, float]) -> None:
        live.step = step
        for name, value in values.items():
            live.log_metric(name, value)
        live.sync()  # type: ignore[no-untyped-call]

    return StartedRun(log, live.end)


TRACKER = Tracker("dvclive", "dvclive", _start, {"DVC_STUDIO_OFFLINE": "true"})
