"""The evaluation tasks of `check`, one file each, and the user's own.

To add a task, write a file here that defines `TASK` (task.py). The config, its JSON Schema and the stage evaluate
include it automatically. Nothing here imports torch or transformers.
"""

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from zerolora.errors import UserError
from zerolora.evaluate.tasks.task import Task
from zerolora.registries import Registry, registered

_modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
TASKS: Registry[Task] = registered("tasks", Task, [module.TASK for module in _modules if hasattr(module, "TASK")])
"""All tasks by name."""


def task_of(check: str, settings: Mapping[str, Any], source: str | None) -> Task:
    """Return the task named `check` with its settings: one of TASKS, or that of a file with the text `source`.

    Raises UserError, naming file and line, if the file defines no task, and naming the key for invalid settings.
    """
    task = TASKS[check] if source is None else _of_file(check, source)
    try:
        return task.configured(settings)
    except ValueError as error:
        raise UserError(f"check_settings: {error}") from None


def _of_file(name: str, source: str) -> Task:
    module = ModuleType(f"zerolora_task_{Path(name).stem}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses look up the module of a class
    try:
        exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102 - the user's file, named in the user's config
    except Exception as error:  # the user's file may raise any
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 1
        reason = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise UserError(f"{name}:{line}: {type(error).__name__}: {reason}; correct that line") from None
    task = getattr(module, "TASK", None)
    if not isinstance(task, Task):
        raise UserError(f"{name}: defines no TASK; define TASK = Task(...), as in docs/tasks.md")
    return task
