"""The export targets, one file each.

To add a target, write a file here that defines `TARGET` (target.py); the config, its JSON Schema and the stage export
discover it. Nothing here imports torch or transformers before a target runs.
"""

import importlib
import pkgutil

from zerolora.export.targets.target import ExportTarget


def _registered() -> dict[str, ExportTarget]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    targets = [module.TARGET for module in modules if hasattr(module, "TARGET")]
    return {target.name: target for target in sorted(targets, key=lambda target: target.name)}


TARGETS = _registered()
"""Every target by name."""
