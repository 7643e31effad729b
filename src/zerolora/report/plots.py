"""The plots of the report page, as SVG: loss curve, step times, row lengths, memory of every strategy."""

import csv
import io
from pathlib import Path
from typing import Any

from zerolora.units import GIB

COLOURS = ("#4c72b0", "#55a868", "#c44e52", "#8172b3", "#ccb974", "#64b5cd", "#8c8c8c", "#dd8452", "#937860")


def loss_curve(table: Path) -> str:
    """Plot training and validation losses by step, from loss.csv."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = _figure(7, 3)
    axes.plot([int(row["step"]) for row in rows], [float(row["loss"]) for row in rows], color=COLOURS[0])
    validated = [(int(row["step"]), float(row["loss_validation"])) for row in rows if row["loss_validation"]]
    if validated:
        axes.plot(*zip(*validated, strict=True), color=COLOURS[1], marker="o", markersize=3, label="validation")
        axes.legend(fontsize=8)
    axes.set(xlabel="step", ylabel="loss per supervised token", yscale="log")
    axes.grid(alpha=0.3)
    return _svg(figure)


def step_times(table: Path) -> str:
    """Plot the parts of each step's time and the tokens/s, from telemetry.csv."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["seconds"]]
    steps = [int(row["step"]) for row in rows]
    figure, axes = _figure(7, 3)
    parts = ("forward", "backward", "communication", "optimizer", "data")
    axes.stackplot(
        steps, *([float(row[f"{part}_seconds"]) for row in rows] for part in parts), labels=parts, colors=COLOURS
    )
    axes.set(xlabel="step", ylabel="seconds of a step")
    rates = axes.twinx()
    rates.plot(steps, [float(row["tokens_per_second"]) for row in rows], color="black", linewidth=0.8)
    rates.set(ylabel="tokens/s (line)", ylim=(0, None))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.1, 0.5))
    return _svg(figure)


def length_histogram(table: Path) -> str:
    """Plot the number of rows of each split by length, from lengths.csv."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ends = [int(row["tokens"]) for row in rows]
    width = ends[0]
    figure, axes = _figure(7, 2.5)
    for name, colour in zip(("train", "validation", "test"), COLOURS, strict=False):
        counts = [int(row[name]) for row in rows]
        axes.stairs(counts, [end - width for end in ends] + [ends[-1]], label=name, color=colour, fill=name == "train")
    axes.set(xlabel="tokens of a row", ylabel="rows", yscale="symlog")
    axes.legend(fontsize=8)
    return _svg(figure)


def memory_bars(estimate: dict[str, Any], where: str) -> str:
    """Plot the predicted memory of every strategy as stacked terms, with the capacity as a line.

    `where` is "gpu" or "host".
    """
    strategies = estimate["strategies"]
    terms = [term for term in strategies[0][where] if term not in ("total", "model_states", "peak_phase")]
    terms = [term for term in terms if any(entry[where][term] for entry in strategies)]
    names = [entry["strategy"] for entry in strategies]
    left = [0.0] * len(names)
    figure, axes = _figure(7, 3)
    for term, colour in zip(terms, COLOURS, strict=False):
        # Activations can be negative: at the peak they may use memory that is counted for gradients (memory/gpu.py).
        widths = [max(0, entry[where][term]) / GIB for entry in strategies]
        axes.barh(names, widths, left=left, label=term.replace("_", " "), color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    capacity = estimate["capacity"][where]
    if capacity:
        axes.axvline(capacity / GIB, color="black", linestyle="--", label="capacity")
    axes.invert_yaxis()
    axes.set(xlabel="GiB per GPU (on CPU: per rank)" if where == "gpu" else "GiB per host")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure)


def _figure(width: float, height: float) -> Any:
    import matplotlib as mpl

    # A cluster has no display. The salt replaces random ids in the SVG, so equal figures give an identical page.
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "zerolora"
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
