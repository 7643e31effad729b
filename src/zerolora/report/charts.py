"""Charts as Vega-Lite specs: a static SVG for print and for readers without JavaScript, and the same spec with tooltips
for the browser.

Text, axes and grid are drawn in currentColor, so both pictures follow the page's light or dark scheme. Text is measured
with vl-convert's own fonts, so an SVG does not depend on the machine.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from zerolora.files import write_text

VEGA_LITE = "6.4"
BUNDLES = Path(__file__).parent / "__pycache__"
WIDTH = 760
"""Width of a static picture, in pixels."""
INK = "currentColor"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8A8A8A", "#F0E442", INK)
"""Okabe and Ito's colours, distinguishable for the colour-blind (https://jfly.uni-koeln.de/color/; B. Wong, Nature
Methods 8, 441, 2011), and a grey. Those with a contrast of 3:1 to white and to the dark page come first."""
POINTS = 300
"""Maximum points of a line. More would be invisible and make the page large."""

CONFIG: dict[str, Any] = {
    "background": None,
    "aria": False,  # the figure has a summary; a label for each mark would be thousands of words
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "domainColor": INK,
        "domainOpacity": 0.4,
        "tickColor": INK,
        "tickOpacity": 0.4,
        "gridColor": INK,
        "gridOpacity": 0.12,
        "labelLimit": 200,
        "labelSeparation": 6,
        "tickCount": 6,
    },
    "axisX": {"grid": False},
    "legend": {
        "orient": "top",
        "columns": 6,
        "title": None,
        "labelColor": INK,
        "labelFontSize": 12,
        "labelLimit": 220,
        "symbolStrokeWidth": 2,
    },
    "range": {"category": list(PALETTE)},
    "line": {"strokeWidth": 2, "color": PALETTE[0]},
    "rule": {"color": INK},
    "text": {"color": INK, "fontSize": 12},
    "bar": {"color": PALETTE[0]},
    "area": {"color": PALETTE[0], "opacity": 0.9},
    "point": {"filled": True, "size": 60, "opacity": 1},
}


@dataclass(frozen=True)
class Chart:
    """A chart with its caption. `name` is its id on the page; `title` and `summary` stand above it.

    A screen reader reads only the summary, so it states the chart's figures.

    `spec` is a Vega-Lite spec of one view or of layers, with inline data and without $schema, width and config. Its
    height is in pixels: a height in steps causes a warning in the browser's console.
    `hover` is an additional layer for the browser (`rule_at_pointer`); it requires a spec of layers.
    """

    name: str
    title: str
    summary: str
    spec: dict[str, Any]
    hover: dict[str, Any] | None = None

    def svg(self) -> str:
        """Return the static picture as SVG."""
        import vl_convert

        return vl_convert.vegalite_to_svg(self._spec(WIDTH), vl_version=VEGA_LITE, allowed_base_urls=[])

    def json(self) -> str:
        """Return the spec for the browser, as JSON that is safe inside a <script> element."""
        spec = self._spec("container")
        if self.hover:
            spec["layer"] = [*spec["layer"], self.hover]
        text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c")

    def _spec(self, width: int | str) -> dict[str, Any]:
        return {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "width": width,
            "height": 220,
            "autosize": {"type": "fit-x", "contains": "padding"},
            "config": CONFIG,
        } | self.spec


def number(field: str, **options: Any) -> dict[str, Any]:
    """Return a channel of numbers."""
    return {"field": field, "type": "quantitative", **options}


def category(field: str, **options: Any) -> dict[str, Any]:
    """Return a channel of names."""
    return {"field": field, "type": "nominal", **options}


def rule_at_pointer(x: str, title: str, series: Sequence[str], unit: str = "", format_: str = ".4~g") -> dict[str, Any]:
    """Return a layer that shows the values of all series at the x nearest to the pointer.

    Its data are {x, "series", "value"}. `format_` is a d3 format; `unit` follows each value.
    """
    return {
        "transform": [{"pivot": "series", "value": "value", "groupby": [x]}],
        "mark": {"type": "rule", "strokeWidth": 1},
        "params": [
            {
                "name": "pointed",
                "select": {"type": "point", "fields": [x], "nearest": True, "on": "pointerover", "clear": "pointerout"},
            }
        ],
        "encoding": {
            "x": number(x),
            "opacity": {"condition": {"param": "pointed", "empty": False, "value": 0.4}, "value": 0},
            "tooltip": [
                number(x, title=title),
                *(number(name, format=format_, title=f"{name}{unit and f', {unit}'}") for name in series),
            ],
        },
    }


def loss_axis(losses: Iterable[float], title: str) -> dict[str, Any]:
    """Return the y channel of losses in the field "value": logarithmic if all are positive."""
    logarithmic = all(loss > 0 for loss in losses)
    return number(
        "value",
        title=f"{title}{' (log scale)' if logarithmic else ''}",
        scale={"type": "log" if logarithmic else "linear"},
        axis={"format": "~g", "tickCount": 5},
    )


def thinned(rows: Sequence[Mapping[str, float]], at_most: int = POINTS) -> list[dict[str, float]]:
    """Return at most `at_most` rows, each the mean of equally many consecutive ones.

    The mean of a column is over the rows that have it; a column that none of them has is missing.
    """
    size = -(-len(rows) // at_most) or 1
    result = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        names = dict.fromkeys(name for row in part for name in row)
        result.append({name: fmean(row[name] for row in part if name in row) for name in names})
    return result


@cache
def javascript() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script that sets `vegaEmbed`.

    Bundling takes vl-convert 1.5 s of CPU time, so the script is cached in __pycache__, preceded by its SHA-256.
    """
    path = BUNDLES / f"vega-{VEGA_LITE}-{version('vl-convert-python')}.js"
    with suppress(OSError, UnicodeDecodeError):
        digest, _, script = path.read_bytes().decode().partition("\n")
        if hashlib.sha256(script.encode()).hexdigest() == digest:
            return script
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE)
    with suppress(OSError):  # without write permission it is bundled each time
        write_text(path, f"{hashlib.sha256(script.encode()).hexdigest()}\n{script}")
    return script
