"""Makes the table of stages in docs/architecture.md from src/zerolora/config/stages.py, when the site is built."""

import re

from zerolora.config.stages import ALL_STAGES, ON_REQUEST

MARK = re.compile(r"(<!-- stages -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """Return the table."""
    rows = ["| command | does | first output |", "|---|---|---|"]
    for stage in ALL_STAGES.values():
        command = " ".join(["zerolora stage", stage.name, *(name.upper() for name in stage.wildcards)])
        when = " Only on request." if stage.name in ON_REQUEST else ""
        rows.append(f"| `{command}` | {stage.about}{when} | `{stage.target}` |")
    return "".join(f"{row}\n" for row in rows)


def written(text: str) -> str:
    """Return the document with the table in it."""
    return MARK.sub(lambda match: match[1] + table() + match[2], text)
