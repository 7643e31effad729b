"""The model families whose spec is read from config.json alone.

To add a family, write a file here with a table `FAMILIES` that maps its model_type to a function of its config.json, or
add a line to the table of a file.

Source of every path, order, bias and default: transformers 5.23, models/<family>/configuration_<family>.py and
modeling_<family>.py; tests/unit/test_shapes.py compares each parameter with the real class.
"""

import importlib
import pkgutil
from collections.abc import Callable

from zerolora.model.families.keys import Keys
from zerolora.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[Keys], ModelSpec]] = {}
for _file in pkgutil.iter_modules(__path__):
    FAMILIES |= getattr(importlib.import_module(f"{__name__}.{_file.name}"), "FAMILIES", {})
