"""Write the names in the registries to config/registry_names.py: python -m zerolora.commands.write_registry_names.

The config rejects unknown names but cannot import the registries, which import it.
"""

import json
from pathlib import Path

from zerolora.config import registry_names
from zerolora.data.formats import FIELDS, FORMS
from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.evaluate.tasks import TASKS
from zerolora.export.targets import TARGETS
from zerolora.methods.registry import TRAINABLE
from zerolora.optimizers import OPTIMIZERS
from zerolora.strategies import STRATEGIES
from zerolora.train.objectives import OBJECTIVES
from zerolora.train.telemetry.trackers import TRACKERS

FILE = Path(registry_names.__file__)
HEAD = '"""The names in the registries, as `make schema` wrote them (commands/write_registry_names.py)."""\n'


def text() -> str:
    """Return the text of config/registry_names.py for the current registries."""
    values: dict[str, tuple[list[str] | dict[str, str], str]] = {
        "FORMS": (list(FORMS), "Forms of rows."),
        "FIELDS": (list(FIELDS), "Fields of all forms."),
        "PROMPT_FORMATS": (list(PROMPT_FORMATS), "Prompt formats."),
        "TASKS": ({name: task.ask for name, task in TASKS.items()}, "Checks of answers, and what a model is to do."),
        "TARGETS": (list(TARGETS), "Targets of export."),
        "METHODS": (list(TRAINABLE), "Methods of training."),
        "OBJECTIVES": (list(OBJECTIVES), "Objectives of training."),
        "OPTIMIZERS": (list(OPTIMIZERS), "Optimizers."),
        "STRATEGIES": ({name: str(each.engine) for name, each in STRATEGIES.items()}, "Strategies, and their engines."),
        "TRACKERS": (list(TRACKERS), "Trackers."),
    }
    return HEAD + "".join(f'\n{_literal(name, value)}\n"""{says}"""\n' for name, (value, says) in values.items())


def _literal(name: str, value: list[str] | dict[str, str]) -> str:
    """Return the assignment of a list or mapping of names as ruff formats it."""
    start, end = "{}" if isinstance(value, dict) else "()"
    items = (
        [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()]
        if isinstance(value, dict)
        else [json.dumps(each) for each in value]
    )
    line = f"{name} = {start}{', '.join(items)}{',' * (start == '(' and len(items) == 1)}{end}"
    return line if len(line) <= 120 else f"{name} = {start}\n" + "".join(f"    {each},\n" for each in items) + end


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
