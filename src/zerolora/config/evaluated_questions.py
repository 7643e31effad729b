"""What selections are compared with: the questions that runs are evaluated with, those of data sets and of tasks.

Every selection depends on all of them. They come from no selection themselves (selection_checks.py): held-out rows of a
data set with selections are always those of another data set.
"""

from zerolora.config.schema import Config, Prepare
from zerolora.config.settings import HeldOutSettings


def evaluated_questions(config: Config) -> dict[str, HeldOutSettings]:
    """Return the data sets and tasks with such questions by a name, none in a config without selections. A data set
    that takes the held-out rows of another one has none of its own."""
    if not config.selections:
        return {}
    own = sorted(name for name in config.used_data if not _reads_others(config.prepare[name]))
    data = {_of_data(name): HeldOutSettings(dataset=name) for name in own}
    return data | {f"task-{name}": HeldOutSettings(task=name) for name in sorted(config.tasks.rows)}


def compared_with(config: Config, dataset: str) -> list[str]:
    """Return the names of those that selected answers to prompts of a data set are compared with: all but its own,
    which it never has a prompt of."""
    own = _of_data(config.prepare[dataset].held_out or dataset) if dataset in config.prepare else ""
    return [name for name in evaluated_questions(config) if name != own]


def _reads_others(data: Prepare) -> bool:
    return bool(data.selections) or data.held_out is not None


def _of_data(name: str) -> str:
    return f"data-{name}"
