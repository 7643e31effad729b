"""What a tracker is: how a run starts in it, takes steps and ends."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = "zerolora"
"""The project or experiment that runs belong to, where the user's variables name no other."""


class StartedRun(NamedTuple):
    """A run that has started."""

    log: Callable[[int, Mapping[str, float]], object]
    """Takes a step's number and its values."""
    close: Callable[[], object]
    """Ends the run."""


@dataclass(frozen=True)
class Tracker:
    """An experiment tracker."""

    name: str
    """The tracker's name in the config."""
    package: str | None
    """The package it needs, imported and installed by this name; None for none."""
    start: Callable[[Path, str, dict[str, Any]], StartedRun]
    """Starts a run: its own directory, which exists, its name, and the settings of training."""
    offline: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that keep it on this machine. A variable that is set already holds."""
