"""Formats an estimate as a table."""

from typing import Any

from zerolora.memory.estimate import Capacity
from zerolora.memory.headroom import asked
from zerolora.units import GIB, gib

BAR = 20  # characters


def table(result: dict[str, Any]) -> str:
    """Format the output of the stage estimate as a table, below a line about the model and the data."""
    model = result["model"]
    head = (
        f"{model['frozen_parameters']:,} frozen and {model['trainable_parameters']:,} trainable parameters "
        f"({model['counted_from']}), longest packed row {result['data']['longest_packed_row']} tokens, "
        f"micro-batch {result['micro_batch']}"
    )
    return f"{head}\n{rows(result['strategies'], Capacity(**result['capacity']))}"


def rows(entries: list[dict[str, Any]], capacity: Capacity) -> str:
    """Return one line for each strategy: GiB by term, and a bar of the total against the capacity."""
    names = ("model_states", "activations", "logits", "buffers", "reserve", "total")
    titles = ("states", "activations", "logits", "buffers", "reserve", "GPU")
    limit = capacity.gpu or capacity.host
    lines = [
        f"{'GiB':<24}" + "".join(f"{title:>12}" for title in titles) + f"{'host':>10}  of {gib(limit)}",
    ]
    for entry in entries:
        gpu, host = entry["gpu"], entry["host"]["total"]
        cells = "".join(f"{gpu[name] / GIB:>12.2f}" for name in names) + f"{host / GIB:>10.2f}"
        used = gpu["total"] if capacity.gpu else asked(host)
        verdict = "" if entry["fits"] else f" {entry['why']}"
        lines.append(f"{entry['strategy']:<24}{cells}  {bar(used / limit)}{verdict}")
    return "\n".join(lines)


def bar(share: float) -> str:
    """Return a bar that is full at 1, and ends with > above 1."""
    filled = min(BAR, round(share * BAR))
    return f"[{'#' * filled}{'.' * (BAR - filled)}{'>' if share > 1 else ']'} {share:4.0%}"
