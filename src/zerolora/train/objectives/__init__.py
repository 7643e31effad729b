"""The objectives that `train.objective` may name, one file each.

To add an objective, write a file here that sets OBJECTIVE (docs/extending.md). The estimate and the planner read them
too, so nothing here imports torch before it computes a loss.
"""

import importlib
import pkgutil

from zerolora.train.objectives.objective import Objective

_modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
_objectives: list[Objective] = [module.OBJECTIVE for module in _modules if hasattr(module, "OBJECTIVE")]
OBJECTIVES: dict[str, Objective] = {each.name: each for each in sorted(_objectives, key=lambda each: each.order)}
"""All objectives by name, the default first."""
