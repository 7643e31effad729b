"""Text of a run as Markdown that means nothing else: code spans, tables, fenced blocks."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from zerolora.errors import printable

Cell = str | int | float | list[Any] | None


class Written(str):
    """Markdown of our own, which is not escaped."""


def code(text: str) -> str:
    """Return text as a code span on one line, in which nothing has a meaning; also in a cell of a table."""
    line = " ".join(printable(" ".join(text.split())).split()) or " "
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    padding = " " if line[0] in "` " or line[-1] in "` " else ""
    return f"{ticks}{padding}{line}{padding}{ticks}".replace("|", "\\|")


def cell(value: Cell) -> str:
    """Return a value as the text of a cell: texts as code, numbers as they are read."""
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
    """Return a table; the header is our own text."""
    lines = [header, ["---"] * len(header), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str, language: str) -> str:
    """Return text as a fenced block, whose fence is longer than any in the text."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"
