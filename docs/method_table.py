"""Makes the table of strategies in docs/methods.md from the registries, when the site is built."""

import re

from zerolora.methods.method import Method
from zerolora.methods.registry import TRAINABLE, create
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Strategy, Target
from zerolora.types import Device, Precision

MARK = re.compile(r"(<!-- strategies of each method -->\n).*?(<!-- end -->)", re.DOTALL)


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
    """Return whether a strategy trains a method: yes on any device, on a GPU only, on several nodes in fp16, or
    never."""
    devices: list[tuple[Device, Precision, int]] = [("cpu", "fp32", 1), ("cuda", "bf16", 1), ("cuda", "fp16", 2)]
    targets = [
        Target(
            device=device,
            precision=precision,
            nodes=nodes,
            ranks_per_node=2,
            nvme="/nvme",
            frozen_type=method.frozen_type,
            unpacks=method.unpacks,
        )
        for device, precision, nodes in devices
    ]
    on_cpu, on_gpu, in_fp16 = (strategy.conflict(target) is None for target in targets)
    return "yes" if on_cpu else "GPU only" if on_gpu else "GPU nodes in fp16" if in_fp16 else "no"


def written(text: str) -> str:
    """Return a page with the table."""
    return MARK.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", text)
