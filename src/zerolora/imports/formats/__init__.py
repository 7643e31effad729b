"""The formats that `zerolora import` reads, one file each.

To add a format, write a file here that defines `FORMAT` (import_format.py), or `FORMATS` for several.
`--from` and docs/import.md then list it.
"""

import importlib
import pkgutil

from zerolora.imports.formats.import_format import Format
from zerolora.registries import Registry, registered

_modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
_own: list[Format] = [module.FORMAT for module in _modules if hasattr(module, "FORMAT")]
_own += [each for module in _modules for each in getattr(module, "FORMATS", ())]
FORMATS: Registry[Format] = registered("importers", Format, _own)
"""The formats by name."""
