"""Write the table of stages in docs/architecture.md from src/zerolora/config/stages.py: python docs/stage_table.py.

With --check it writes nothing, and exits with 1 if the table is out of date.
"""

import re
import sys

from module_table import ROOT, write_or_check

from zerolora.config.stages import ALL_STAGES, ON_REQUEST

DOCUMENT = ROOT / "docs/architecture.md"
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
    """Return the document with the table written again."""
    return MARK.sub(lambda match: match[1] + table() + match[2], text)


def main() -> int:
    """Write the table, or compare it."""
    code: int = write_or_check(DOCUMENT, written(DOCUMENT.read_text(encoding="utf-8")))
    return code


if __name__ == "__main__":
    sys.exit(main())
