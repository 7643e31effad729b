"""Text of a run escaped as Markdown: code spans, tables, fenced blocks."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from zerolora.errors import printable

Cell = str | int | float | list[Any] | None


class Written(str):
    """Markdown that is not escaped again."""


def code(text: str) -> str:
    """Return text as a code span on one line, valid in a table cell too."""
    line = " ".join(printable(" ".join(text.split())).split()) or " "
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    padding = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{ticks}{padding}{line}{padding}{ticks}".replace("|", "\\|")


def cell(value: Cell) -> str:
    """Return a value as the text of a cell: text as code, numbers formatted."""
    if isinstance(value, Written):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return code(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table. The header is not escaped."""
    lines = [header, ["---"] * len(header), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str, language: str) -> str:
    """Return text as a fenced block. The fence is longer than any in the text."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"
