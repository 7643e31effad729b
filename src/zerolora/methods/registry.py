"""Every method by name, found by its file."""

import importlib
import pkgutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from zerolora import methods
from zerolora.errors import UserError, shown
from zerolora.methods.base import Method, TrainableMethod
from zerolora.methods.full import WEIGHTS as FULL_WEIGHTS
from zerolora.methods.full import FullMethod
from zerolora.methods.peft_format import CONFIG, read_config
from zerolora.strategies import STRATEGIES
from zerolora.strategies.base import Strategy, Target
from zerolora.types import Device, Precision


def _registered() -> dict[str, type[Method]]:
    found: dict[str, type[Method]] = {}
    for file in pkgutil.iter_modules(methods.__path__):
        module = importlib.import_module(f"{methods.__name__}.{file.name}")
        classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method))
        found |= {each.name: each for each in classes if each.__module__ == module.__name__ and hasattr(each, "name")}
    return found


METHODS = _registered()
"""Every method by name."""


TRAINABLE = {name: method for name, method in METHODS.items() if issubclass(method, TrainableMethod)}
"""Those that `train.method` may name."""


def table() -> str:
    """Return which methods each strategy trains, as the table of docs/methods.md."""
    columns: dict[str, Method] = {}
    for name, method in TRAINABLE.items():
        if not method.quantizes():
            columns[name] = create(name)
            continue
        columns[f"{name}, 4 bits"] = create(name)
        if not columns[f"{name}, 4 bits"].unpacks:
            columns[f"{name}, int8"] = create(name, quantization="int8")
    rows = [
        f"| `{name}` | {' | '.join(_cell(strategy, method) for method in columns.values())} |"
        for name, strategy in STRATEGIES.items()
    ]
    return "\n".join([f"| strategy | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}", *rows])


def _cell(strategy: Strategy, method: Method) -> str:
    """Return whether a strategy trains a method: yes on any device, on a GPU only, or never."""
    devices: list[tuple[Device, Precision]] = [("cpu", "fp32"), ("cuda", "bf16")]
    targets = [
        Target(
            device=device,
            precision=precision,
            nodes=1,
            ranks_per_node=2,
            nvme="/nvme",
            frozen_type=method.frozen_type,
            unpacks=method.unpacks,
        )
        for device, precision in devices
    ]
    on_cpu, on_gpu = (strategy.conflict(target) is None for target in targets)
    return "yes" if on_cpu else "GPU only" if on_gpu else "no"


def of_directory(directory: Path) -> type[TrainableMethod]:
    """Return a method that can merge what a directory holds: an adapter in peft's format, or whole weights.

    Raises UserError if no method can.
    """
    if not (directory / CONFIG).exists() and (directory / FULL_WEIGHTS).exists():
        return FullMethod
    kind = read_config(directory).get("peft_type")
    for method in TRAINABLE.values():
        if method.peft_type is not None and method.peft_type == kind:
            return method
    kinds = sorted({method.peft_type for method in TRAINABLE.values() if method.peft_type})
    raise UserError(
        f"{directory / CONFIG}: peft_type is {shown(kind)}, which cannot be merged; "
        f"write an adapter of {', '.join(kinds)}"
    )


def create(name: str, **settings: Any) -> Method:
    """Return a method with those of `settings` that it has; JSON's lists become tuples.

    Raises UserError if there is no such method.
    """
    if name not in METHODS:
        raise UserError(f"--method {name}: write one of {', '.join(sorted(METHODS))}")
    known = {field.name for field in fields(METHODS[name])}
    return METHODS[name](**{key: _tuples(value) for key, value in settings.items() if key in known})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
