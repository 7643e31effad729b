"""The optimizers that `train.optimizer` may name, one file each.

To add an optimizer, write a file here that sets OPTIMIZER (docs/extending.md). `bnb.py` holds what those of
bitsandbytes share. Nothing here imports torch before it builds an optimizer.
"""

import importlib
import pkgutil

from zerolora.optimizers.optimizer import Optimizer


def _registered() -> dict[str, Optimizer]:
    """Return the OPTIMIZER of every module of this package that has one, in the order of their `order`."""
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    found = [module.OPTIMIZER for module in modules if hasattr(module, "OPTIMIZER")]
    return {optimizer.name: optimizer for optimizer in sorted(found, key=lambda each: each.order)}


OPTIMIZERS: dict[str, Optimizer] = _registered()
"""All optimizers by name, the default first."""
