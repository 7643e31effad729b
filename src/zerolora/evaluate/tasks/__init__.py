"""The evaluation tasks that `prepare.check` may name, one file each.

To add a task, write a file here that defines `TASK` (base.py). The config, its JSON Schema and the stage evaluate find
it by its file. Nothing here imports torch or transformers.
"""

import importlib
import pkgutil

from zerolora.evaluate.tasks.base import Task


def _registered() -> dict[str, Task]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    tasks = [module.TASK for module in modules if hasattr(module, "TASK")]
    return {task.name: task for task in sorted(tasks, key=lambda task: str(task.name))}


TASKS = _registered()
"""All tasks by name."""
