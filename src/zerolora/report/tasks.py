"""What fine-tuning changed in the further tasks of a run: each metric of both models, with intervals."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolora.evaluate.intervals import Z, bootstrap_mean
from zerolora.files import read_json

FOLDER = "tasks"
"""Of the results of a run, or of a base model."""
HELD_OUT = "held_out.metrics.json"
"""In that folder, the metrics on the run's own held-out rows."""
REMOVED = Path("work/removed_tasks")
ENDS = ("_low", "_high")
LEFT_OUT = (*ENDS, "_stderr", "rows")
"""How the names end of what is not a metric."""
Asked = tuple[Mapping[str, float], Any]
"""The metrics of a model and its answers, as `zerolora task` writes them."""


def files_of(task: str) -> tuple[str, str]:
    """Return the names of the files in a folder of tasks that have a task's metrics, and the answers."""
    return f"{task}.json", f"{task}.answers.json"


def changes(before: Asked, after: Asked) -> dict[str, dict[str, list[float]]]:
    """Return, by metric, {base, tuned, difference: [value, low, high], or [value] where there is no interval}.

    That of the difference is a bootstrap over pairs; it is there if the metric is the share of right answers to the
    same rows.
    """
    (base, asked), (tuned, answered) = before, after
    result = {}
    for metric in (name for name in tuned if name in base and not name.endswith(LEFT_OUT)):
        pairs = _right(asked, answered) if metric == "accuracy" else []
        change = bootstrap_mean([other - one for one, other in pairs]) if pairs else ()
        result[metric] = {
            "base": _with_interval(base, metric),
            "tuned": _with_interval(tuned, metric),
            "difference": [tuned[metric] - base[metric], *change],
        }
    return result


def compared(names: Iterable[str], base: Path, run: Path) -> dict[str, dict[str, Any]]:
    """Return what `changes` finds, by task. Raises UserError if a file is missing."""
    return {name: changes(_read(base, name), _read(run, name)) for name in names}


def set_aside(names: Sequence[str], *folders: Path) -> None:
    """Move the results of tasks that the config no longer has from `folders` to work/removed_tasks/.

    DVC compares the whole folder, and another clone has only those of the config's tasks.
    """
    for path in (path for folder in folders for path in (folder / FOLDER).glob("*.json")):
        if path.name != HELD_OUT and path.name.partition(".")[0] not in names:
            kept = REMOVED / path.relative_to(path.anchor)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another run's report has moved that of the base model
                path.replace(kept)


def flat(tasks: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> dict[str, float]:
    """Return the metrics of the fine-tuned model as task.NAME.METRIC, with _low and _high."""
    return {
        f"task.{name}.{metric}{end}": value
        for name, metrics in tasks.items()
        for metric, figures in metrics.items()
        for end, value in zip(("", *ENDS), figures["tuned"], strict=False)
    }


def _read(folder: Path, name: str) -> Asked:
    metrics, answers = (read_json(folder / FOLDER / file, "zerolora task") for file in files_of(name))
    return metrics, answers


def _right(asked: Any, answered: Any) -> list[tuple[bool, bool]]:
    """Return which answers of both are right; none for lm-evaluation-harness, whose answers are in its own form."""
    if not isinstance(asked, list) or [each["place"] for each in asked] != [each["place"] for each in answered]:
        return []
    return [(one["right"], other["right"]) for one, other in zip(asked, answered, strict=True)]


def _with_interval(metrics: Mapping[str, float], name: str) -> list[float]:
    """Return a metric and the ends of its interval; those of lm-evaluation-harness are of its standard error."""
    value = metrics[name]
    if f"{name}_stderr" in metrics:
        half = Z * metrics[f"{name}_stderr"]
        return [value, value - half, value + half]
    return [value, *(metrics[f"{name}{end}"] for end in ENDS if f"{name}{end}" in metrics)]
