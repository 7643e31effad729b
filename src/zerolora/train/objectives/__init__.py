"""The objectives that `train.objective` may name, one file each: what is learned from a row.

To add an objective, write a file here that sets OBJECTIVE (docs/extending.md). The estimate and the planner read them
too, so nothing here imports torch before a loss is computed.
"""

import importlib
import pkgutil

from zerolora.train.objectives.objective import Objective


def _registered() -> dict[str, Objective]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    objectives = [module.OBJECTIVE for module in modules if hasattr(module, "OBJECTIVE")]
    return {objective.name: objective for objective in sorted(objectives, key=lambda each: each.order)}


OBJECTIVES: dict[str, Objective] = _registered()
"""All objectives by name, the default first."""
