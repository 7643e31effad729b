"""The formats that `zerolora import` reads, one file each.

To add a format, write a file here that defines `FORMAT` (import_format.py). `--from` and docs/import.md then list it.
"""

import importlib
import pkgutil

from zerolora.imports.formats.import_format import Format


def _registered() -> dict[str, Format]:
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    return {module.FORMAT.name: module.FORMAT for module in modules if hasattr(module, "FORMAT")}


FORMATS = _registered()
"""The formats by name."""
