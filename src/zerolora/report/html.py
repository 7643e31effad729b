"""Self-contained HTML pages: shell.html with its style and script, and macros for sections, charts and tables in
parts.html.

A page extends the shell: `{% extends "shell.html" %}{% from "parts.html" import figure, section %}`. pages.py escapes
everything that it prints.
"""

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from zerolora.pages import environment
from zerolora.report.charts import javascript
from zerolora.units import gib

HERE = Path(__file__).parent
FILTERS: dict[str, Callable[[Any], str]] = {
    "gib": gib,
    "spec": lambda chart: Markup(chart.json()),  # noqa: S704 - JSON without <
    "svg": lambda chart: Markup(chart.svg()),  # noqa: S704 - Vega escapes its texts
}


@cache
def templates() -> jinja2.Environment:
    """Return the environment of the templates in this directory."""
    result = environment(HERE)
    result.filters |= FILTERS
    return result


def render(template: str, **values: Any) -> str:
    """Return the page of a template in this directory. Equal values give equal bytes.

    The page's policy lets a browser run the page's two scripts and load nothing.
    """
    scripts = [javascript(), (HERE / "page.js").read_text(encoding="utf-8")]
    page: str = (
        templates()
        .get_template(template)
        .render(
            style=Markup((HERE / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - of this package
            scripts=[Markup(script) for script in scripts],  # noqa: S704 - likewise
            policy=_policy(scripts),
            **values,
        )
    )
    return page


def _policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy: only these scripts and no requests. Vega writes style elements."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
