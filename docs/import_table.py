"""Write the tables of docs/import.md from the registry of formats: python docs/import_table.py.

With --check it writes nothing, and exits with 1 if the tables are out of date.
"""

import re
import sys
from pathlib import Path

from module_table import write_or_check

from zerolora.imports.formats import FORMATS

DOCUMENT = Path(__file__).resolve().parent / "import.md"
MARK = re.compile(r"(<!-- keys of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """Return the table of a format's keys, those with an equivalent first; the others with the group of their line."""
    source = FORMATS[name]
    lines = [f"| key of {source.title} | key here | translation, or why there is none |", "|---|---|---|"]
    for key, rule in sorted(source.rules.items(), key=lambda item: not item[1].new):
        text = rule.remark.replace("|", "\\|")
        if key in source.defaults:
            text = "; ".join(part for part in (text, f"{source.defaults[key]} if left out") if part)
        if not rule.new:
            text = f"*{rule.group}*: {text}"
        ours = ", ".join(f"`{each}`" for each in re.split(r", | or ", rule.new)) if rule.new else "–"
        lines.append(f"| `{key}` | {ours} | {text} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the document with every table generated again."""
    return MARK.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", text)


if __name__ == "__main__":
    sys.exit(write_or_check(DOCUMENT, written(DOCUMENT.read_text(encoding="utf-8"))))
