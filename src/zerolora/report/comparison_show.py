"""`zerolora show`: a row for each run, and where to read on."""

from pathlib import Path

from zerolora.report.comparison_columns import columns_of
from zerolora.report.comparison_rows import what_is_there
from zerolora.report.comparison_terminal import shown, width_here
from zerolora.report.show import summary

PAGE = Path("compare/index.html")
"""Of the results directory."""


def show(results: Path, *, colour: bool) -> str:
    """Return the table of all runs of `results`/config.json, and next steps.

    Raises UserError if config.json is missing, or a file of a run is broken.
    """
    rows, overrides = what_is_there(results)
    columns = [column for column in columns_of(rows, overrides) if not column.table_only]
    text = shown(rows, columns, overrides, width_here(), colour)
    if len(rows) == 1:
        return f"{text}\n\n{summary(results)}"
    page = results / PAGE
    where = f"open {page}" if page.is_file() else "`zerolora compare` writes a page of what is there"
    return f"{text}\n\nNext: {where}: all columns, losses, time against memory."
