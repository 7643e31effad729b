"""What selections are compared with: the questions that runs are evaluated with, those of data sets and of tasks.

Every selection depends on all of them. They come from no selection themselves (selection_checks.py): held-out rows of a
data set with selections are always those of another data set.
"""

from pathlib import Path

from zerolora.config.schema import Config, Prepare
from zerolora.config.settings import HarnessTaskSettings, HeldOutSettings
from zerolora.config.user_files import harness_files

OF_TASK = "task-"
"""Before the name of a task."""


def evaluated_questions(config: Config) -> dict[str, HeldOutSettings]:
    """Return the data sets and tasks with such questions by a name, none in a config without selections.

    A data set with selections, or with the held-out rows of another one, has none of its own; nor has one that is read
    from results and holds out no rows. Those that are sampled first are there even without any, so that there is one.
    """
    if not config.selections:
        return {}
    own = sorted(name for name in config.used_data if _has_own(config.prepare[name]))
    result = {_of_data(name): HeldOutSettings(dataset=name) for name in own}
    result |= {f"{OF_TASK}{name}": HeldOutSettings(task=name) for name in config.tasks.rows}
    for name, task in config.tasks.harness.items():
        settings = HarnessTaskSettings(**task.model_dump(), files=harness_files())
        result[f"{OF_TASK}{name}"] = HeldOutSettings(harness=settings)
    return dict(sorted(result.items()))


def own_questions(config: Config, dataset: str) -> str:
    """Return the name of the questions of a data set's own held-out rows, to which none of its prompts is like."""
    return _of_data(config.prepare[dataset].held_out or dataset) if dataset in config.prepare else ""


def _has_own(data: Prepare) -> bool:
    if data.selections or data.held_out is not None:
        return False
    return data.holds_out("validation") or data.holds_out("test") or not is_of_results(data.path)


def is_of_results(path: str | None) -> bool:
    """Return whether rows are read from a file that a stage may have made of a selection."""
    return path is not None and Path(path).is_relative_to("results")


def _of_data(name: str) -> str:
    return f"data-{name}"
