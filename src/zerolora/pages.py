"""HTML pages by templates in which every text is text: escaped, with its control characters visible.

All HTML that this package writes is a template's. What a template prints is escaped by its environment, not by the
template, except for `Markup`; nothing else makes HTML (tests/unit/test_layout.py).
"""

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from zerolora.log import escaped


def environment(directory: Path) -> jinja2.Environment:
    """Return the environment of the templates in a directory of this package."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(directory),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _visible(value: Any) -> Any:
    """Return a value to print, with control characters escaped, but for line ends and tabs."""
    if isinstance(value, Markup):
        return Markup(escaped(value))  # noqa: S704 - it is one already
    return value if isinstance(value, int | float) else escaped(str(value))
