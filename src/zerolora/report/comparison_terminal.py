"""A comparison in a terminal: as many columns as fit, the reasons of runs that did not end well below."""

import io
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from zerolora.report.comparison_columns import REASON, RUN, Column, cell
from zerolora.report.comparison_rows import Row

WIDEST = 120
"""Characters of a line."""
GAP = 2
STYLES = {"done": "green", "failed": "red", "refused": "yellow", "not run": "dim"}


def width_here() -> int:
    """Return the width of this terminal, or WIDEST if it is wider or there is none."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


def shown(
    rows: Sequence[Row],
    columns: Sequence[Column],
    overrides: Mapping[str, Mapping[str, Any]],
    width: int = WIDEST,
    colour: bool = False,
) -> str:
    """Return the table in lines of at most `width` characters.

    Columns that do not fit are left out, the least important first, and named below the table.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = {column.key: [cell(column, row, overrides) for row in rows] for column in columns if column is not REASON}
    widths = {
        column.key: max(map(cell_len, [column.title, *cells[column.key]])) for column in columns if column is not REASON
    }
    fitting, left_out = _fitting([column for column in columns if column is not REASON], widths, width)
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
    # A page of a terminal ends with the width of the console, which pads the last column of a wide table.
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(Text(f"{row[RUN.key]}: {row['status']}: {row['reason']}"))
    if left_out:
        names = ", ".join(column.title for column in left_out)
        console.print(Text(f"Left out for room: {names}; the page and table.csv have them."))
    written: Any = console.file
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _fitting(columns: Sequence[Column], widths: Mapping[str, int], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit, and those that do not."""
    fitting = list(columns)
    while sum(widths[column.key] + GAP for column in fitting) - GAP > width:
        least = max((column.rank for column in fitting), default=0)
        if not least:  # names of runs alone are wider; they are folded
            break
        fitting.remove(next(column for column in reversed(fitting) if column.rank == least))
    return fitting, [column for column in columns if column not in fitting]
