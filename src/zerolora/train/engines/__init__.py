"""The engines that train an adapted model: engines/NAME.py defines one subclass of `Engine`.

In each, the gradient of a step is that of the sum of losses over ranks and micro-batches, divided by `divisor`. Compute
is in the rendered precision; master weights, moments and clipping are in fp32.
"""

import importlib
import pkgutil

from zerolora.train.engines.engine import Engine

SHARED = ("engine",)
"""Modules of the package that are not engines."""


def names() -> list[str]:
    """Return the names of all engines."""
    return [module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED]


def engine_class(name: str) -> type[Engine]:
    """Return the engine of this name, importing only its module."""
    assert name in names(), f"{name} is none of {', '.join(names())}"
    module = importlib.import_module(f"{__name__}.{name}")
    (result,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Engine) and value.__module__ == module.__name__
    )
    return result
