"""Makes the tables of docs/import.md from the registry of formats, when the site is built."""

import re

from zerolora.imports.formats import FORMATS

MARK = re.compile(r"(<!-- keys of ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    """Return a page with its tables of keys."""
    return MARK.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", text)
