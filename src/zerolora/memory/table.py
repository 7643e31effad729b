"""Formats an estimate as a table of at most WIDTH columns."""

from typing import Any

from zerolora.memory.estimate import Capacity
from zerolora.memory.reserve import with_headroom
from zerolora.units import GIB, gib

WIDTH = 120  # maximum columns of a line
NAME, BAR, SMALLEST_BAR = 24, 20, 5  # maximum characters of a name and of a bar, and minimum of a bar
TERMS = {
    "model_states": "states",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "reserve": "reserve",
    "total": "GPU",
}
SEARCHED = {"max_micro_batch": "max batch", "max_sequence_length": "max length"}
"""Titles of the columns of searches."""


def table(result: dict[str, Any]) -> str:
    """Format the output of the stage estimate as a table under a line on the model and the data."""
    model = result["model"]
    head = (
        f"{model['frozen_parameters']:,} frozen and {model['trainable_parameters']:,} trainable parameters "
        f"({model['counted_from']}), longest packed row {result['data']['longest_packed_row']} tokens, "
        f"micro-batch {result['micro_batch']}"
    )
    if of_teacher := result["strategies"][0]["disk"].get("teacher"):
        head += f"\nthe teacher's probabilities take {gib(of_teacher)} on disk"
    return f"{head}\n{rows(result['strategies'], Capacity(**result['capacity']))}"


def rows(entries: list[dict[str, Any]], capacity: Capacity) -> str:
    """Return one line for each strategy: GiB by term, results of searches, and a bar of the total against the capacity.

    The bar is the GPU's, or the host's if only that is too small; `-` marks a strategy that cannot run on any capacity.
    """
    limit = capacity.gpu or capacity.host
    searched = [key for key in SEARCHED if any(entry.get(key) is not None for entry in entries)]
    titles = ["GiB", *TERMS.values(), "host", *(SEARCHED[key] for key in searched)]
    lines = [
        [
            cut(entry["strategy"], NAME),
            *(cell(entry["gpu"][term] / GIB) for term in TERMS),
            cell(entry["host"]["needed"] / GIB),
            *(f"{entry[key]:,}" if entry[key] else "none" for key in searched),
        ]
        for entry in entries
    ]
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
    left = WIDTH - sum(widths) - 2 * len(widths)
    size = min(BAR, left - len("[> 1.0e+99% host"))
    shares = [_bar(entry, capacity, size if size >= SMALLEST_BAR else 0) for entry in entries]
    share_title = cut(f"of {limit / GIB:.4g} GiB", left)
    return "\n".join(
        f"{line[0]:<{widths[0]}}"
        + "".join(f"  {text:>{width}}" for text, width in zip(line[1:], widths[1:], strict=True))
        + f"  {share}"
        for line, share in zip([titles, *lines], [share_title, *shares], strict=True)
    )


def _bar(entry: dict[str, Any], capacity: Capacity, size: int) -> str:
    gpu, host = entry["gpu"]["total"], with_headroom(entry["host"]["needed"])
    on_host = capacity.gpu is None or (gpu <= capacity.gpu and host > capacity.host)
    share = host / capacity.host if on_host else gpu / (capacity.gpu or 1)
    if not entry["fits"] and share <= 1:
        return "-"
    return bar(share, size) + (" host" if on_host and capacity.gpu else "")


def bar(share: float, size: int = BAR) -> str:
    """Return a bar that is full at 1, and ends with > above 1; with size 0 only the percentage."""
    text = f"{share:4.0%}" if share < 100 else f"{100 * share:.1e}%"
    if not size:
        return text
    filled = min(size, round(share * size))
    return f"[{'#' * filled}{'.' * (size - filled)}{'>' if share > 1 else ']'} {text}"


def cell(number: float) -> str:
    """Return a number with two decimals, or in scientific notation if longer than eight characters."""
    return f"{number:.2f}" if abs(number) < 99_999 else f"{number:.1e}"


def cut(text: str, most: int) -> str:
    """Return a text without its beginning if it is too long."""
    return text if len(text) <= most else f"…{text[1 - most :]}"
