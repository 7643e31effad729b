"""Charts of the pages as Vega-Lite specs: a static SVG for print and for readers without JavaScript, and the same spec
for the browser, which draws it with tooltips.

A spec names no colour of the page: text, axes and grid have the text's own colour (currentColor), so that both pictures
follow a light or dark scheme. Text is measured with the fonts that vl-convert brings, so that an SVG does not depend on
the machine.
"""

import json
from dataclasses import dataclass
from typing import Any

VEGA_LITE = "6.4"
WIDTH = 760
"""Pixels of a static picture."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8A8A8A", "#F0E442")
"""Okabe and Ito's colours, which the colour-blind can tell apart (https://jfly.uni-koeln.de/color/, and B. Wong, Nature
Methods 8, 441, 2011), grey for black; first those with a contrast of 3:1 to white and to the dark page."""
INK = "currentColor"

CONFIG: dict[str, Any] = {
    "background": None,
    "aria": False,  # the figure around it has a summary; a name for each mark would be thousands of words
    "font": "Liberation Sans, Arial, Helvetica, sans-serif",
    "padding": 4,
    "autosize": {"type": "fit-x", "contains": "padding"},
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
        "tickCount": 6,
    },
    "axisX": {"grid": False},
    "legend": {
        "orient": "top",
        "columns": 5,
        "title": None,
        "labelColor": INK,
        "labelFontSize": 12,
        "labelLimit": 220,
        "symbolStrokeWidth": 2,
    },
    "range": {"category": list(PALETTE)},
    "line": {"strokeWidth": 2},
    "rule": {"color": INK},
    "text": {"color": INK, "fontSize": 12},
    "bar": {"color": PALETTE[0]},
    "area": {"color": PALETTE[0], "opacity": 0.9},
    "point": {"filled": True, "size": 60, "opacity": 1},
}


@dataclass(frozen=True)
class Chart:
    """A chart and its words: `name` is its id on the page; `title` and `summary` stand above it. A screen reader has
    nothing else of it, so the summary says what the chart shows, in figures.

    `spec` is a Vega-Lite spec of one view or of layers, with its data in it, and without $schema, width and config.
    """

    name: str
    title: str
    summary: str
    spec: dict[str, Any]

    def svg(self) -> str:
        """Return the static picture."""
        import vl_convert

        return vl_convert.vegalite_to_svg(self._spec(WIDTH), vl_version=VEGA_LITE, allowed_base_urls=[])

    def json(self) -> str:
        """Return the spec for the browser, as JSON that may stand in a <script> element."""
        text = json.dumps(self._spec("container"), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c")

    def _spec(self, width: int | str) -> dict[str, Any]:
        return {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "width": width,
            "height": 220,
            "config": CONFIG,
        } | self.spec


def javascript() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which sets `vegaEmbed`."""
    import vl_convert

    return vl_convert.javascript_bundle(vl_version=VEGA_LITE)
