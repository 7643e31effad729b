"""The strategies that `render.strategy` may name, one file each.

To add a strategy, write a file here that sets STRATEGY (docs/extending.md). `engines/` holds the code that strategies
of one engine share. Nothing here imports torch, the memory model or the planner.
"""

import importlib
import pkgutil

from zerolora.strategies.strategy import Strategy


def _registered() -> dict[str, Strategy]:
    """Return the STRATEGY of every module of this package that has one, in the order of their `order`."""
    modules = (importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__))
    found = [module.STRATEGY for module in modules if hasattr(module, "STRATEGY")]
    return {strategy.name: strategy for strategy in sorted(found, key=lambda each: each.order)}


STRATEGIES: dict[str, Strategy] = _registered()
"""All strategies by name, those that shard and move least first."""


def table() -> str:
    """Return the strategies as the table of docs/choice.md."""
    rows = (f"| `{each.name}` | {each.sharded} | {each.costs} |" for each in STRATEGIES.values())
    return "\n".join(["| strategy | sharded or offloaded | cost |", "|---|---|---|", *rows])
