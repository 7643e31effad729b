"""The objectives that `train.objective` may name, one file each.

To add an objective, write a file here that sets OBJECTIVE (docs/extending.md). The estimate and the planner read them
too, so nothing here imports torch before it computes a loss.
"""

import importlib
import pkgutil

from zerolora.registries import Registry, registered
from zerolora.train.objectives.objective import Objective
from zerolora.types import RowKind

_modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
_own: list[Objective] = [module.OBJECTIVE for module in _modules if hasattr(module, "OBJECTIVE")]
OBJECTIVES: Registry[Objective] = registered("objectives", Objective, sorted(_own, key=lambda each: each.order))
"""All objectives by name, the default first."""


def reading(rows: RowKind) -> list[str]:
    """Return the names of the objectives that read a kind of rows, the usual one first."""
    return [name for name, objective in OBJECTIVES.items() if objective.rows == rows]
