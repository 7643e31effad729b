"""Metrics of base and fine-tuned model in the further tasks of a run, with intervals."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from zerolora.evaluate.intervals import Z, paired
from zerolora.files import read_json

FOLDER = "tasks"
"""Relative to the results of a run or of a base model."""
HELD_OUT = "held_out.metrics.json"
"""File of FOLDER with the metrics on the run's held-out rows."""
REMOVED = Path("work/removed_tasks")
ENDS = ("_low", "_high")
NOT_METRICS = (*ENDS, "_stderr", "rows", "_prompts")
"""Suffixes of keys that are not metrics."""
Changes = dict[str, dict[str, list[float]]]
"""`base`, `tuned` and `difference` by metric: the value, and the ends of its interval, if any."""
TaskResult = tuple[Mapping[str, float], Any]
"""The metrics of a model and its answers, as `zerolora stage task` writes them."""


def files_of(task: str) -> tuple[str, str]:
    """Return the names of the files with a task's metrics and answers."""
    return f"{task}.json", f"{task}.answers.json"


def held_out_changes(figures: Mapping[str, Any]) -> Changes:
    """Return the metrics on the held-out rows from difference.json."""

    def with_ends(name: str) -> list[float]:
        return [figures[f"{name}{end}"] for end in ("", *ENDS) if f"{name}{end}" in figures]

    names = (name for name in figures if f"base_{name}" in figures and "." not in name and not name.endswith(ENDS))
    return {
        name: {
            "base": with_ends(f"base_{name}"),
            "tuned": with_ends(name),
            "difference": with_ends("difference" if name == "accuracy" else f"{name}_difference"),
        }
        for name in names
    }


def changes(before: TaskResult, after: TaskResult) -> Changes:
    """Return the metrics of a further task.

    Only the difference of the accuracies on the same rows has an interval.
    """
    (base, base_answers), (tuned, tuned_answers) = before, after
    result = {}
    for metric in (name for name in tuned if name in base and not name.endswith(NOT_METRICS)):
        pairs = _right(base_answers, tuned_answers) if metric == "accuracy" else []
        change = paired(np.array([is_right - was_right for was_right, is_right in pairs])) if pairs else ()
        result[metric] = {
            "base": _with_interval(base, metric),
            "tuned": _with_interval(tuned, metric),
            "difference": [tuned[metric] - base[metric], *change],
        }
    return result


def compared(names: Iterable[str], base: Path, run: Path) -> dict[str, Changes]:
    """Return the result of `changes` by task. Raises UserError if a file is missing."""
    return {name: changes(_read(base, name), _read(run, name)) for name in names}


def set_aside(names: Sequence[str], *folders: Path) -> None:
    """Move the results of tasks that are no longer in the config from `folders` to work/removed_tasks/.

    DVC compares the whole folder, and another clone has results of the config's tasks only.
    """
    for path in (path for folder in folders for path in (folder / FOLDER).glob("*.json")):
        if path.name != HELD_OUT and path.name.partition(".")[0] not in names:
            target = REMOVED / path.relative_to(path.anchor)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another run's report moved the base model's result
                path.replace(target)


def flat(tasks: Mapping[str, Changes]) -> dict[str, float]:
    """Return the metrics of the fine-tuned model as task.NAME.METRIC, with _low and _high."""
    return {
        f"task.{name}.{metric}{end}": value
        for name, metrics in tasks.items()
        for metric, figures in metrics.items()
        for end, value in zip(("", *ENDS), figures["tuned"], strict=False)
    }


def _read(folder: Path, name: str) -> TaskResult:
    metrics, answers = (read_json(folder / FOLDER / file, "zerolora stage task") for file in files_of(name))
    return metrics, answers


def _right(base: Any, tuned: Any) -> list[tuple[bool, bool]]:
    """Return which answers of both models are right; empty for lm-evaluation-harness, whose answers differ in form."""
    if not isinstance(base, list) or [each["place"] for each in base] != [each["place"] for each in tuned]:
        return []
    return [(one["right"], other["right"]) for one, other in zip(base, tuned, strict=True)]


def _with_interval(metrics: Mapping[str, float], name: str) -> list[float]:
    """Return a metric and the ends of its interval, which lm-evaluation-harness has as a standard error."""
    value = metrics[name]
    if f"{name}_stderr" in metrics:
        half = Z * metrics[f"{name}_stderr"]
        return [value, value - half, value + half]
    return [value, *(metrics[f"{name}{end}"] for end in ENDS if f"{name}{end}" in metrics)]
