"""`zerolora show`: the comparison in a terminal, with as many columns as fit, then the reasons of unfinished runs."""

import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolora.errors import printable
from zerolora.report.comparison_columns import REASON, RUN, Column, Overrides, cell, columns_of
from zerolora.report.comparison_rows import Row, all_runs
from zerolora.report.repeats import figures, table_of, verdicts
from zerolora.report.show import summary

PAGE = Path("compare/index.html")
"""Relative to the results directory."""
WIDEST = 120
"""Maximum characters of a line."""
GAP = 2
STYLES = {"done": "green", "failed": "red", "refused": "yellow", "not run": "dim"}


def show(results: Path, *, colour: bool) -> str:
    """Return the table of all runs of `results`/config.json, and the next steps.

    Raises UserError if config.json is missing, or a file of a run is broken.
    """
    rows, overrides = all_runs(results)
    columns = [column for column in columns_of(rows, overrides) if not column.table_only]
    text = format_table(rows, columns, overrides, terminal_width(), colour)
    repeated = figures(rows, columns, overrides)
    if repeated := [each for each in repeated if each.column is repeated[0].column]:
        text = "\n".join([text, "", *aligned(table_of(repeated)), *verdicts(repeated)])
    if len(rows) == 1:
        return f"{text}\n\n{summary(results)}"
    page = results / PAGE
    where = f"open {page}" if page.is_file() else "`zerolora compare` writes a page of what is there"
    return f"{text}\n\nNext: {where}: all columns, losses, time against memory."


def aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a header and lines of cells in columns, the first at the left edge and the others at the right one."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        yield (" " * GAP).join(cells).rstrip()


def terminal_width() -> int:
    """Return the width of this terminal, at most WIDEST; WIDEST if there is none."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


def format_table(
    rows: Sequence[Row], columns: Sequence[Column], overrides: Overrides, width: int = WIDEST, colour: bool = False
) -> str:
    """Return the table in lines of at most `width` characters.

    Columns that do not fit are dropped, least important first, and listed below the table.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = [column for column in columns if column is not REASON]
    cells = {column.key: [printable(cell(column, row, overrides)) for row in rows] for column in columns}
    widths = {column.key: max(map(cell_len, [column.title, *cells[column.key]])) for column in columns}
    fitting, dropped = _fitting(columns, widths, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in fitting:
        table.add_column(Text(column.title), justify="right" if column.number else "left", overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(
            *(
                Text(cells[column.key][index], STYLES.get(row["status"], "") if column.key == "status" else "")
                for column in fitting
            )
        )
    # The width is explicit, since the console pads the last column of a table to it.
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(Text(printable(f"{row[RUN.key]}: {row['status']}: {row['reason']}")))
    if dropped:
        names = ", ".join(column.title for column in dropped)
        console.print(Text(f"Left out for room: {names}; the page and table.csv have them."))
    written: Any = console.file
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _fitting(columns: Sequence[Column], widths: Mapping[str, int], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit, and the others."""
    fitting = list(columns)
    while sum(widths[column.key] + GAP for column in fitting) - GAP > width:
        least = max((column.rank for column in fitting), default=0)
        if not least:  # only columns that are always shown are left; their text is folded
            break
        fitting.remove(next(column for column in reversed(fitting) if column.rank == least))
    return fitting, [column for column in columns if column not in fitting]
