"""Every method by name, found by its file.

No stage imports this module: a stage imports the method that it runs, and only that can change its result.
"""

import importlib
import pkgutil
from dataclasses import fields
from typing import Any

from zerolora import methods
from zerolora.errors import UserError
from zerolora.methods.base import Method


def _registered() -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for file in pkgutil.iter_modules(methods.__path__):
        module = importlib.import_module(f"{methods.__name__}.{file.name}")
        classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method))
        found |= {each.name: each for each in classes if each.__module__ == module.__name__ and hasattr(each, "name")}
    return found


METHODS = _registered()
"""Every method by name."""


def create(name: str, **settings: Any) -> Method:
    """Return a method with those of `settings` that it has. Raises UserError if there is no such method."""
    if name not in METHODS:
        raise UserError(f"--method {name}: write one of {', '.join(sorted(METHODS))}")
    known = {field.name for field in fields(METHODS[name])}
    return METHODS[name](**{key: value for key, value in settings.items() if key in known})
