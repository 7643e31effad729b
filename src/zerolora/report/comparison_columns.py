"""The columns of a comparison: what each shows, in which unit, and how much it matters where there is little room."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolora.report.comparison_rows import Row
from zerolora.units import byte_size, gib

Shown = Callable[[Any], str]


@dataclass(frozen=True)
class Column:
    """A column: `key` is that of a row, and the name of the metric, which names its unit."""

    key: str
    title: str
    shown: Shown = str
    rank: int = 0
    """Of importance; 0 always has room, others are left out of a terminal from the highest number on."""
    number: bool = True
    says: str = ""
    """What it is, where the title does not say it."""
    table_only: bool = False
    """It has a column in table.csv and metrics.json alone."""


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _percent(value: float) -> str:
    return f"{value:.0f} %"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _energy(joules: float) -> str:
    return f"{joules / 3600:,.1f} Wh"


def _hours(value: float) -> str:
    return f"{value:.3g}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


RUN = Column("run", "run", number=False)
STATUS = Column("status", "status", number=False, says="done, failed, refused (before training), or not run")
REASON = Column("reason", "reason", number=False)
ACCURACY = Column(
    "accuracy", "accuracy", lambda value: f"{value:.3f}", 1, says="share of right answers, with its 95 % interval"
)
FIGURES = (
    Column("strategy", "strategy", number=False, rank=1),
    ACCURACY,
    Column("accuracy_low", "accuracy from", table_only=True),
    Column("accuracy_high", "accuracy to", table_only=True),
    Column("loss", "loss", _count, 2, says="per supervised token, on the evaluated rows"),
    Column("loss_validation", "validation loss", _count, 13),
    Column("wall_seconds", "wall time", _seconds, 2, says="of training, loading and saving included"),
    Column("tokens_per_second", "tokens/s", _count, 3),
    Column("step_seconds", "step", _seconds, 6, says="seconds of an optimizer step"),
    Column("predicted_step_seconds", "step predicted", _seconds, 10),
    Column("mfu", "MFU", _share, 6, says="model FLOPs utilisation"),
    Column("gpu_percent", "GPU use", _percent, 5, says="time in which a kernel ran, of rank 0's GPU"),
    Column("measured_gpu_bytes", "GPU memory", gib, 3, says="highest peak of any GPU"),
    Column("predicted_gpu_bytes", "GPU predicted", gib, 7),
    Column("measured_host_bytes", "host memory", gib, 4, says="peak of a node"),
    Column("predicted_host_bytes", "host predicted", gib, 7),
    Column("cpu_percent", "CPU", _percent, 9, says="of all cores of rank 0's node"),
    Column("communication_bytes", "sent a step", byte_size, 8, says="bytes of a step's collectives, of rank 0"),
    Column("gpu_hours", "GPU-hours", _hours, 5),
    Column("rank_hours", "rank-hours", _hours, 9),
    Column("energy_joules", "energy", _energy, 7, says="of all GPUs, by NVML"),
    Column("adapter_bytes", "adapter", byte_size, 11),
    Column("checkpoint_bytes", "checkpoint", byte_size, 12),
    Column("trainable_parameters", "trained", _count, 12, says="parameters"),
    Column("steps", "steps", _count, 13),
)
IN_STRATEGY = "render.strategy"
"""An override that the column of strategies shows."""
OVERRIDE_RANK = 5
TASK, TASK_RANK = "task.", 4
"""Of the keys of a row that are metrics of further tasks (report/tasks.py), and of their columns."""
ENDS = ("_low", "_high")


def columns_of(rows: Sequence[Row], overrides: Mapping[str, Mapping[str, Any]]) -> list[Column]:
    """Return the columns that apply to any run: overrides after the strategy, the reason last."""
    applying = [each for each in FIGURES if any(row.get(each.key) is not None for row in rows)]
    keys = sorted({key for own in overrides.values() for key in own} - {IN_STRATEGY})
    ours = [Column(key, key, _text, OVERRIDE_RANK, number=False) for key in keys]
    tasks = [_of_task(key, rows) for key in dict.fromkeys(itertools.chain(*rows)) if key.startswith(TASK)]
    reason = [REASON] if any(row["reason"] for row in rows) else []
    return [RUN, STATUS, *applying[:1], *ours, *applying[1:], *tasks, *reason]


def _of_task(key: str, rows: Sequence[Row]) -> Column:
    """Return the column of a figure of a further task. Of each task only the first metric has room in what is read."""
    if key.endswith(ENDS):
        return Column(key, key, table_only=True)
    _, task, metric = key.split(".", 2)
    first = next(each for row in rows for each in row if each.startswith(f"{TASK}{task}."))
    title = f"{task}: {metric.replace('_', ' ')}"
    return Column(key, title, _count, TASK_RANK, says="of a further task", table_only=key != first)


def cell(column: Column, row: Row, overrides: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a row shows in a column; empty if it has no value there."""
    value = value_of(column, row, overrides)
    if value is None:
        return ""
    ends = [row[f"{column.key}{end}"] for end in ENDS if f"{column.key}{end}" in row]
    return column.shown(value) + (f" ({'–'.join(map(column.shown, ends))})" if ends else "")


def value_of(column: Column, row: Row, overrides: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a row's value of a column, None if it has none."""
    return row.get(column.key, overrides.get(row["run"], {}).get(column.key))
