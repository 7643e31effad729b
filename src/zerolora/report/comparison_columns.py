"""The columns of a comparison: their formats, units and priorities."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerolora.evaluate.free_form import BITS, FREE_FORM
from zerolora.report.comparison_rows import Row
from zerolora.units import byte_size, gib

Overrides = Mapping[str, Mapping[str, Any]]
"""The overrides of each run, by key of the config."""


@dataclass(frozen=True)
class Column:
    """A column. `key` is the key in a row and the name of the metric; it includes the unit."""

    key: str
    title: str
    text: Callable[[Any], str] = str
    rank: int = 0
    """Priority in a terminal: 0 is always shown; of the others, the highest number is dropped first."""
    number: bool = True
    explanation: str = ""
    """Shown as the title's tooltip."""
    table_only: bool = False
    """Only in table.csv and metrics.json."""


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


RUN = Column("run", "run", number=False)
STATUS = Column("status", "status", number=False, explanation="done, failed, refused (before training), or not run")
REASON = Column("reason", "reason", number=False)
ACCURACY = Column(
    "accuracy", "accuracy", "{:.3f}".format, 1, explanation="share of right answers, with its 95 % interval"
)
EXACT_MATCH = replace(
    ACCURACY, title="exact match", rank=9, explanation="share of answers that equal the data's, with its 95 % interval"
)
"""The accuracy of free-form answers, which hardly any answer equals."""
LOSS = Column("loss", "loss", _count, 2, explanation="per supervised token, on the evaluated rows")
FIGURES = (
    Column("strategy", "strategy", number=False, rank=1),
    ACCURACY,
    Column("accuracy_low", "accuracy from", table_only=True),
    Column("accuracy_high", "accuracy to", table_only=True),
    Column(
        "preference_accuracy",
        "preference",
        "{:.3f}".format,
        1,
        explanation="share of held-out pairs whose chosen answer is more likely than the rejected one",
    ),
    Column("preference_accuracy_low", "preference from", table_only=True),
    Column("preference_accuracy_high", "preference to", table_only=True),
    Column("preference_accuracy_per_token", "preference a token", "{:.3f}".format, 8, explanation="by mean of a token"),
    Column("longer_answer_rate", "longer wins", "{:.3f}".format, 9, explanation="pairs whose chosen answer is longer"),
    *(
        Column(
            f"{answers}_log_probability_difference",
            f"{answers} change",
            "{:+.3g}".format,
            rank,
            explanation=f"of the log-probability of {answers} answers by fine-tuning, in nats an answer",
        )
        for answers, rank in (("chosen", 3), ("rejected", 8), ("desirable", 3))
    ),
    LOSS,
    Column(BITS, "bits a byte", _count, 3, explanation="of the evaluated answers; comparable between tokenizers"),
    Column("loss_validation", "validation loss", _count, 13),
    Column("wall_seconds", "wall time", _seconds, 2, explanation="of training, loading and saving included"),
    Column("tokens_per_second", "tokens/s", _count, 3),
    Column("step_seconds", "step", _seconds, 6, explanation="seconds of an optimizer step"),
    Column("predicted_step_seconds", "step predicted", _seconds, 10),
    Column("mfu", "MFU", lambda share: f"{100 * share:.1f} %", 6, explanation="model FLOPs utilisation"),
    Column("gpu_percent", "GPU use", "{:.0f} %".format, 5, explanation="time in which a kernel ran, of rank 0's GPU"),
    Column("measured_gpu_bytes", "GPU memory", gib, 3, explanation="highest peak of any GPU"),
    Column("predicted_gpu_bytes", "GPU predicted", gib, 7),
    Column("measured_host_bytes", "host memory", gib, 4, explanation="peak of a node"),
    Column("predicted_host_bytes", "host predicted", gib, 7),
    Column("cpu_percent", "CPU", "{:.0f} %".format, 9, explanation="of all cores of rank 0's node"),
    Column("communication_bytes", "sent a step", byte_size, 8, explanation="bytes of a step's collectives, of rank 0"),
    Column("gpu_hours", "GPU-hours", "{:.3g}".format, 5),
    Column("rank_hours", "rank-hours", "{:.3g}".format, 9),
    Column("energy_joules", "energy", lambda joules: f"{joules / 3600:,.1f} Wh", 7, explanation="of all GPUs, by NVML"),
    Column("adapter_bytes", "adapter", byte_size, 11),
    Column("checkpoint_bytes", "checkpoint", byte_size, 12),
    Column("trainable_parameters", "trained", _count, 12, explanation="parameters"),
    Column("steps", "steps", _count, 13),
)
IN_STRATEGY = "render.strategy"
"""This override is in the column of strategies."""
OVERRIDE_RANK = 5
TASK, TASK_RANK = "task.", 4
"""Prefix of the metrics of further tasks in a row (report/tasks.py), and the rank of their columns."""
ENDS = ("_low", "_high")


def columns_of(rows: Sequence[Row], overrides: Overrides) -> list[Column]:
    """Return the columns that at least one run has a value for: overrides follow the strategy; the reason is last."""
    applying = [each for each in _ordered(rows) if any(row.get(each.key) is not None for row in rows)]
    keys = sorted({key for own in overrides.values() for key in own} - {IN_STRATEGY})
    ours = [Column(key, key, _text, OVERRIDE_RANK, number=False) for key in keys]
    tasks = [_of_task(key, rows) for key in dict.fromkeys(itertools.chain(*rows)) if key.startswith(TASK)]
    reason = [REASON] if any(row["reason"] for row in rows) else []
    return [RUN, STATUS, *applying[:1], *ours, *applying[1:], *tasks, *reason]


def _ordered(rows: Sequence[Row]) -> list[Column]:
    """Return the columns in their order: the losses before the accuracy if all answers are free-form."""
    judged = [row for row in rows if row.get(ACCURACY.key) is not None]
    if not judged or not all(row.get(FREE_FORM) for row in judged):
        return list(FIGURES)
    of_accuracy = [each for each in FIGURES if each.key.partition("_")[0] == ACCURACY.key]
    others = [each for each in FIGURES if each not in of_accuracy]
    after = others.index(LOSS) + 2
    others[after - 2] = replace(LOSS, rank=1)
    return [*others[:after], EXACT_MATCH, *of_accuracy[1:], *others[after:]]


def _of_task(key: str, rows: Sequence[Row]) -> Column:
    """Return the column of a further task's metric. Tables for reading have only the first metric of each task."""
    if key.endswith(ENDS):
        return Column(key, key, table_only=True)
    _, task, metric = key.split(".", 2)
    first = next(each for row in rows for each in row if each.startswith(f"{TASK}{task}."))
    title = f"{task}: {metric.replace('_', ' ')}"
    return Column(key, title, _count, TASK_RANK, explanation="of a further task", table_only=key != first)


def cell(column: Column, row: Row, overrides: Overrides) -> str:
    """Return the text of a row's value in a column, empty if it has none."""
    value = value_of(column, row, overrides)
    if value is None:
        return ""
    ends = [row[f"{column.key}{end}"] for end in ENDS if f"{column.key}{end}" in row]
    return column.text(value) + (f" ({'–'.join(map(column.text, ends))})" if ends else "")


def value_of(column: Column, row: Row, overrides: Overrides) -> Any:
    """Return a row's value in a column, None if it has none."""
    return row.get(column.key, overrides.get(row["run"], {}).get(column.key))
