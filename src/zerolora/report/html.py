"""Pages that need nothing but their own file: shell.html with its style and script, and parts.html, which has macros
for sections, charts and tables.

A page of another package extends the shell: `{% extends "shell.html" %}{% from "parts.html" import figure, section %}`.
Everything that a template prints is escaped, unless it is one of the constants below.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from zerolora.report.charts import Chart, javascript
from zerolora.units import gib

HERE = Path(__file__).parent


def render(template: str, folder: Path = HERE, **values: Any) -> str:
    """Return the page of a template in `folder`. Equal values give equal bytes.

    The page's policy lets a browser run its own two scripts and load nothing.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "gib": gib,
        "spec": lambda chart: Markup(chart.json()),  # noqa: S704 - JSON without <
        "svg": _svg,
    }
    scripts = [javascript(), (HERE / "page.js").read_text(encoding="utf-8")]
    return environment.get_template(template).render(
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - of this package
        scripts=[Markup(script) for script in scripts],  # noqa: S704 - likewise
        policy=_policy(scripts),
        **values,
    )


def _svg(chart: Chart) -> Markup:
    return Markup(chart.svg())  # noqa: S704 - Vega escapes its texts


def _policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy: these scripts and no other, no request at all; Vega writes style elements."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"
