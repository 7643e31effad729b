"""The experiment trackers that `train.tracker` may name: rank 0 sends them telemetry, too.

To add a tracker, add a function that starts a run, and an entry of the table. Each is offline unless the user has set
its variables. A resumed run is a new run there, with all its steps from the first. A tracker that fails is reported
once and skipped; training continues. Nothing here imports a tracker's package before a run starts.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zerolora.config.values import NO_TRACKER
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.registries import Registry, registered

PROJECT = "zerolora"
"""The default project or experiment of runs."""


class StartedRun(NamedTuple):
    """A run in a tracker."""

    log: Callable[[int, Mapping[str, float]], object]
    """Logs a step's number and its values."""
    close: Callable[[], object]


@dataclass(frozen=True)
class Tracker:
    """An experiment tracker."""

    name: str
    """The tracker's name in the config."""
    about: str
    """Description for the reference."""
    package: str | None
    """The required package, imported and installed by this name, if any."""
    start: Callable[[Path, str, dict[str, Any]], StartedRun]
    """Starts a run with its existing directory, its name, and the settings of training."""
    offline: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that keep it on this machine; those that the user has set take precedence."""


def _dvclive(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    from dvclive import Live

    # The pipeline's dvc.yaml lists metrics and plots, and its commits are the experiments.
    live = Live(str(folder), dvcyaml=False, save_dvc_exp=False, report=None)
    live.log_params(settings)

    def log(step: int, values: Mapping[str, float]) -> None:
        live.step = step
        for name, value in values.items():
            live.log_metric(name, value)
        live.sync()  # type: ignore[no-untyped-call]

    return StartedRun(log, live.end)


def _mlflow(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    import mlflow

    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", folder.as_uri()))
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    mlflow.start_run(run_name=run)
    mlflow.log_params(settings)
    return StartedRun(lambda step, values: mlflow.log_metrics(dict(values), step=step), mlflow.end_run)


def _swanlab(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    import swanlab

    project = os.environ.get("SWANLAB_PROJ_NAME", PROJECT)
    swanlab.init(project=project, name=run, log_dir=str(folder), config=settings)
    return StartedRun(lambda step, values: swanlab.log(dict(values), step=step), swanlab.finish)


def _tensorboard(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder)  # otherwise it shows the steps of every attempt
    writer = SummaryWriter(str(folder))

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return StartedRun(log, writer.close)


def _wandb(folder: Path, run: str, settings: dict[str, Any]) -> StartedRun:
    import wandb

    started = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, dir=str(folder), config=settings)
    return StartedRun(lambda step, values: started.log(dict(values), step=step), started.finish)


TRACKERS: Registry[Tracker] = registered(
    "trackers",
    Tracker,
    [
        Tracker(
            name="dvclive",
            about="DVCLive: files that `dvc plots` draws",
            package="dvclive",
            start=_dvclive,
            offline={"DVC_STUDIO_OFFLINE": "true"},
        ),
        Tracker(
            name="mlflow",
            about="MLflow, into a file store unless MLFLOW_TRACKING_URI names a server",
            package="mlflow",
            start=_mlflow,
            # Its databases need another dependency.
            offline={"MLFLOW_ALLOW_FILE_STORE": "true"},
        ),
        Tracker(
            name="swanlab",
            about="SwanLab, offline until `swanlab sync`",
            package="swanlab",
            start=_swanlab,
            offline={"SWANLAB_MODE": "offline"},
        ),
        Tracker(
            name="tensorboard",
            about="TensorBoard: event files, written through torch",
            package="tensorboard",
            start=_tensorboard,
        ),
        Tracker(
            name="wandb",
            about="Weights & Biases, offline until `wandb sync`",
            package="wandb",
            start=_wandb,
            offline={"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        ),
    ],
)
"""Every tracker by name."""


def check(name: str) -> None:
    """Raise UserError if the tracker of the config is not installed. Imports no tracker."""
    if name == NO_TRACKER:
        return
    package = TRACKERS[name].package
    if package and importlib.util.find_spec(package) is None:
        raise UserError(
            f"train.tracker is {name}, but that package is not installed; install it with "
            f"`{sys.executable} -m pip install {package}`, or set tracker: none"
        )


class TrackedRun:
    """One run in a tracker, or in none."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Start a run with the name of `folder`, below which it writes."""
        self.name = name
        self._run: StartedRun | None = None
        if name != NO_TRACKER:
            for variable, value in TRACKERS[name].offline.items():
                os.environ.setdefault(variable, value)
            self._try(lambda: self._start(folder / name, folder.name, settings))

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the measured values of a line of telemetry."""
        if run := self._run:
            values = {name: float(value) for name, value in row.items() if name != "step" and value is not None}
            self._try(lambda: run.log(int(row["step"]), values))

    def close(self) -> None:
        """End the run."""
        if self._run:
            self._try(self._run.close)

    def _start(self, folder: Path, run: str, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = TRACKERS[self.name].start(folder.absolute(), run, dict(settings))

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # training must continue
            self._run = None
            reason = f"{type(error).__name__}: {error}"
            LOGGER.warning(f"train.tracker: {self.name} failed and is skipped from now on ({reason})")
