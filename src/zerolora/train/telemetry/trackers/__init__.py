"""The experiment trackers that `train.tracker` may name, one file each: telemetry goes there as well, from rank 0.

A tracker is added by a file here that defines `TRACKER` (base.py). Each is offline unless the user has set its own
variables. A resumed run is a new run there, with all its steps from the first. A tracker that fails is reported once
and left out; training goes on. Nothing here imports a tracker's package before a run starts.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerolora.config.values import NO_TRACKER
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.train.telemetry.trackers.tracker import StartedRun, Tracker


def _registered() -> dict[str, Tracker]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    trackers = [module.TRACKER for module in modules if hasattr(module, "TRACKER")]
    return {tracker.name: tracker for tracker in sorted(trackers, key=lambda tracker: str(tracker.name))}


TRACKERS = _registered()
"""Every tracker by name."""


def check(name: str) -> None:
    """Raise UserError if the tracker of the config is not installed. Imports no tracker."""
    if name == NO_TRACKER:
        return
    package = TRACKERS[name].package
    if package and importlib.util.find_spec(package) is None:
        raise UserError(
            f"train.tracker is {name}, but that package is not installed; install it with "
            f"`{sys.executable} -m pip install {package}`, or write tracker: none"
        )


class TrackedRun:
    """One run in a tracker, or in none."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """Start a run named as `folder` is, and write below it."""
        self.name = name
        self._run: StartedRun | None = None
        if name != NO_TRACKER:
            for variable, value in TRACKERS[name].offline.items():
                os.environ.setdefault(variable, value)
            self._try(lambda: self._start(folder / name, folder.name, settings))

    def log(self, row: Mapping[str, Any]) -> None:
        """Log a line of telemetry, without what was not measured."""
        if run := self._run:
            values = {name: float(value) for name, value in row.items() if name != "step" and value is not None}
            self._try(lambda: run.log(int(row["step"]), values))

    def close(self) -> None:
        """Write what is still to be written."""
        if self._run:
            self._try(self._run.close)

    def _start(self, folder: Path, run: str, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = TRACKERS[self.name].start(folder.absolute(), run, dict(settings))

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # whatever it is: the run matters more
            self._run = None
            reason = f"{type(error).__name__}: {error}"
            LOGGER.warning(f"train.tracker: {self.name} fails and is left out from here on ({reason})")
