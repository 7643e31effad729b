"""The objectives of runs, and what they need of the data."""

from typing import TYPE_CHECKING

from zerolora.train.objectives import OBJECTIVES
from zerolora.types import RowKind

if TYPE_CHECKING:
    from zerolora.config.schema import Config


def needs_reference(config: "Config", run: str) -> bool:
    """Return whether the objective of a run compares with the model that training starts from."""
    name = _name(config, run)
    return name in OBJECTIVES and OBJECTIVES[name].reference


def row_kinds(config: "Config", dataset: str) -> dict[RowKind, str]:
    """Return what the runs of a data set need its rows to hold, each with one of their objectives."""
    names = [_name(config, run) for run, settings in config.all_runs.items() if settings.dataset == dataset]
    return {OBJECTIVES[name].rows: name for name in reversed(names) if name in OBJECTIVES}


def _name(config: "Config", run: str) -> str:
    return str(config.all_runs[run].train.get("objective", config.train.objective))
