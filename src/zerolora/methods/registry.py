"""Every method by name, discovered from its file."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from zerolora import methods
from zerolora.errors import UserError, shown
from zerolora.methods.method import WHOLE_WEIGHTS, Method, TrainableMethod
from zerolora.methods.peft_format import ADAPTER, CONFIG
from zerolora.model import foreign
from zerolora.model.added_tokens import FILE as TOKENS
from zerolora.model.added_tokens import add_rows
from zerolora.model.added_tokens import of_directory as of_tokens
from zerolora.registries import Registry, registered


def _own() -> Iterator[type[Method]]:
    for file in pkgutil.iter_modules(methods.__path__):
        module = importlib.import_module(f"{methods.__name__}.{file.name}")
        classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method))
        yield from (each for each in classes if each.__module__ == module.__name__ and hasattr(each, "name"))


METHODS: Registry[type[Method]] = registered("methods", Method, _own(), classes=True)
TRAINABLE: Registry[type[TrainableMethod]] = Registry(
    lambda: {name: method for name, method in METHODS.items() if issubclass(method, TrainableMethod)}
)
"""Values of `train.method`."""
OWN_FILES = (CONFIG, ADAPTER, WHOLE_WEIGHTS, TOKENS)
"""Files of trained weights that decide their meaning."""


def of_directory(directory: Path) -> type[TrainableMethod]:
    """Return a method that can merge a directory's adapter in peft's format, or whole weights.

    Raises UserError if no method can.
    """
    if not (directory / CONFIG).exists() and (directory / WHOLE_WEIGHTS).exists():
        return TRAINABLE["full"]
    kind = foreign.adapter_config(directory).get("peft_type")
    for method in TRAINABLE.values():
        if method.peft_type is not None and method.peft_type == kind:
            return method
    kinds = sorted({method.peft_type for method in TRAINABLE.values() if method.peft_type})
    raise UserError(
        f"{directory / CONFIG}: peft_type is {shown(kind)}, which cannot be merged; "
        f"use an adapter of {', '.join(kinds)}"
    )


def check_published(directory: Path, base: Path) -> None:
    """Raise UserError unless a directory's adapter, or whole weights, are complete and belong to the model of directory
    `base` (adapter_check.py)."""
    from zerolora.model.architecture import built_on_meta, config_of

    model = built_on_meta(config_of(base))
    add_rows(model, of_tokens(directory))
    of_directory(directory).updates(directory, model)


def create(name: str, **settings: Any) -> Method:
    """Return a method with the settings that it has, lists as tuples. Raises UserError for an unknown method."""
    if name not in METHODS:
        raise UserError(f"--method {name}: use one of {', '.join(sorted(METHODS))}")
    known = {field.name for field in fields(METHODS[name])}
    return METHODS[name](**{key: _tuples(value) for key, value in settings.items() if key in known})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
