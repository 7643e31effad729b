"""Draw what compare.py found: predicted against traced bytes, and the errors of other estimators beside ours."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

GIB = 2**30


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the scatter plot, one point a combination; on the line, the prediction is what was traced."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "zerolora"  # the same figures give the same file
    figure, axes = pyplot.subplots(figsize=(6.4, 6.4))
    others = [
        ("deepspeed", "DeepSpeed's estimator", "tab:orange"),
        ("accelerate", "accelerate estimate-memory", "tab:red"),
    ]
    for name, label, color in others:
        points = [(row["traced"] / GIB, row[name] / GIB) for row in rows if row.get(name)]
        if points:
            traced, answered = zip(*points, strict=True)
            axes.scatter(traced, answered, s=14, color=color, alpha=0.5, label=label)
    axes.scatter(
        [row["traced"] / GIB for row in rows],
        [row["predicted"] / GIB for row in rows],
        s=14,
        color="tab:blue",
        label="zerolora estimate",
    )
    ends = [min(row["traced"] for row in rows) / GIB / 1.5, max(row["traced"] for row in rows) / GIB * 1.5]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="traced peak, GiB", ylabel="predicted, GiB")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
