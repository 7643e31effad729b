"""The objectives of runs, and what they need of the data."""

from typing import TYPE_CHECKING, Any, NamedTuple

from zerolora.config.objective_sections import START
from zerolora.config.values import RUN_ADAPTER
from zerolora.train.objectives import OBJECTIVES
from zerolora.types import RowKind

if TYPE_CHECKING:
    from zerolora.config.schema import Config


class Teacher(NamedTuple):
    """The teacher of a run."""

    model: str
    """Its name in fetch."""
    adapter: str | None

    @property
    def run(self) -> str | None:
        """The run whose adapter it has."""
        match = RUN_ADAPTER.fullmatch(self.adapter or "")
        return match[1] if match else None


def needs_reference(config: "Config", run: str) -> bool:
    """Return whether the objective of a run compares with the log-probabilities of a reference."""
    name = _name(config, run)
    return name in OBJECTIVES and OBJECTIVES[name].reference


def reference_key(config: "Config", run: str) -> tuple[str, ...]:
    """Return the key below `train` that names the reference of a run."""
    return (_name(config, run), "reference")


def reference_adapter(config: "Config", run: str) -> str | None:
    """Return the directory of the adapter that the objective of a run compares with: by default, the one that it starts
    from; None for the base model."""
    objective, train = _name(config, run), config.all_runs[run].train
    own = train.get(objective)
    default = getattr(getattr(config.train, objective, None), "reference", START)
    reference = own.get("reference", default) if isinstance(own, dict) else default
    if reference == START:
        reference = train.get("from_adapter")
    return f"results/{reference}/adapter" if reference in config.all_runs else reference


def teacher_of(config: "Config", run: str) -> Teacher | None:
    """Return the teacher of a run, by its own values or the config's; None without one."""
    name = _name(config, run)
    if name not in OBJECTIVES or not OBJECTIVES[name].taught:
        return None
    own = config.all_runs[run].train.get(name)
    common = getattr(config.train, name, None)
    values: dict[str, Any] = {**dict(common or {}), **(own if isinstance(own, dict) else {})}
    model, adapter = values.get("teacher"), values.get("adapter")
    return Teacher(model, adapter if isinstance(adapter, str) else None) if isinstance(model, str) else None


def row_kinds(config: "Config", dataset: str) -> dict[RowKind, str]:
    """Return what the runs of a data set need its rows to hold, each with one of their objectives."""
    names = [_name(config, run) for run, settings in config.all_runs.items() if settings.dataset == dataset]
    return {OBJECTIVES[name].rows: name for name in reversed(names) if name in OBJECTIVES}


def holds_out(config: "Config", dataset: str, split: str) -> bool:
    """Return whether a data set has rows of a split, validation or test: its own, or those of another data set. Of one
    whose rows hold something else, as texts beside pairs, it has the test rows alone: they have no loss."""
    data = config.prepare[dataset]
    if data.held_out not in config.prepare:
        return data.holds_out(split)
    alike = [next(iter(row_kinds(config, name)), "texts") for name in (dataset, data.held_out)]
    return (split == "test" or len({*alike}) == 1) and config.prepare[data.held_out].holds_out(split)


def _name(config: "Config", run: str) -> str:
    return str(config.all_runs[run].train.get("objective", config.train.objective))
