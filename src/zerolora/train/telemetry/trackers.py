"""Telemetry into a tracker of experiments, if the config asks for one (train.tracker). Rank 0 only.

Each is offline unless the user has set its own variables. A resumed run is a new run there, with all its steps from the
first. A tracker that fails is told once and left out; training goes on.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.log import LOGGER

Log = Callable[[int, Mapping[str, float]], Any]
Close = Callable[[], Any]
PROJECT = "zerolora"
# What keeps each on this machine. A variable that is set already holds.
OFFLINE = {
    "dvclive": {"DVC_STUDIO_OFFLINE": "true"},
    "swanlab": {"SWANLAB_MODE": "offline"},
    "wandb": {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    "mlflow": {"MLFLOW_ALLOW_FILE_STORE": "true"},  # its databases are another dependency
    "tensorboard": {},
}


def check(kind: str) -> None:
    """Raise UserError if the tracker of the config is not installed. Imports nothing."""
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise UserError(
            f"train.tracker is {kind}, but that package is not installed; install it with "
            f"`{sys.executable} -m pip install {kind}`, or write tracker: none"
        )


class Tracker:
    """One run in a tracker; "none" is none at all."""

    def __init__(self, kind: str, folder: Path, settings: dict[str, Any]) -> None:
        """Write below `folder`, which is named as the run is."""
        self.kind = kind
        self._log: Log | None = None
        self._close: Close | None = None
        if kind != "none":
            for name, value in OFFLINE[kind].items():
                os.environ.setdefault(name, value)
            self._try(lambda: self._start(folder / kind, folder.name, settings))

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a line of telemetry, but for what was not measured."""
        if log := self._log:
            values = {name: float(value) for name, value in row.items() if name != "step" and value is not None}
            self._try(lambda: log(int(row["step"]), values))

    def close(self) -> None:
        """Write what is still to be written."""
        if self._close:
            self._try(self._close)

    def _start(self, folder: Path, run: str, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._close = STARTED[self.kind](folder.absolute(), run, settings)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # whatever it is: the run matters more
            self._log = self._close = None
            LOGGER.warning(
                f"train.tracker: {self.kind} fails and is left out from here on ({type(error).__name__}: {error})"
            )


def _dvclive(folder: Path, run: str, settings: dict[str, Any]) -> tuple[Log, Close]:
    from dvclive import Live

    # The pipeline's own dvc.yaml lists metrics and plots, and its commits are the experiments.
    live = Live(str(folder), dvcyaml=False, save_dvc_exp=False, report=None)
    live.log_params(settings)

    def log(step: int, values: Mapping[str, float]) -> None:
        live.step = step
        for name, value in values.items():
            live.log_metric(name, value)
        live.sync()

    return log, live.end


def _tensorboard(folder: Path, run: str, settings: dict[str, Any]) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder)  # it would show the steps of every attempt
    writer = SummaryWriter(str(folder))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, run: str, settings: dict[str, Any]) -> tuple[Log, Close]:
    import wandb

    found = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, dir=str(folder), config=settings)
    return lambda step, values: found.log(dict(values), step=step), found.finish


def _mlflow(folder: Path, run: str, settings: dict[str, Any]) -> tuple[Log, Close]:
    import mlflow

    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", folder.as_uri()))
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    mlflow.start_run(run_name=run)
    mlflow.log_params(settings)
    return lambda step, values: mlflow.log_metrics(dict(values), step=step), mlflow.end_run


def _swanlab(folder: Path, run: str, settings: dict[str, Any]) -> tuple[Log, Close]:
    import swanlab

    swanlab.init(project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT), name=run, log_dir=str(folder), config=settings)
    return lambda step, values: swanlab.log(dict(values), step=step), swanlab.finish


STARTED: dict[str, Callable[[Path, str, dict[str, Any]], tuple[Log, Close]]] = {
    "dvclive": _dvclive,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
}
