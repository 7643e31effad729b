"""The export targets, one file each.

To add a target, write a file here that defines `TARGET` (target.py); the config, its JSON Schema and the stage export
discover it. Nothing here imports torch or transformers before a target runs.
"""

import importlib
import pkgutil

from zerolora.export.targets.target import ExportTarget
from zerolora.registries import Registry, registered

_modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
_own: list[ExportTarget] = [module.TARGET for module in _modules if hasattr(module, "TARGET")]
TARGETS: Registry[ExportTarget] = registered("targets", ExportTarget, _own)
"""Every target by name."""
