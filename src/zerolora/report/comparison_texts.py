"""A comparison as Markdown, as CSV, and as metrics for DVC."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from zerolora.report.comparison_columns import Column, cell, value_of
from zerolora.report.comparison_rows import Row
from zerolora.report.markdown import Written, code, table

Overrides = Mapping[str, Mapping[str, Any]]


def markdown(rows: Sequence[Row], columns: Sequence[Column], overrides: Overrides) -> str:
    """Return a table as Markdown. Text is escaped."""
    lines = []
    for row in rows:
        cells = []
        for column in columns:
            text = cell(column, row, overrides)
            cells.append(Written(text if column.number or not text or column.key == "status" else code(text)))
        lines.append(cells)
    header = [code(column.title) if "." in column.title else column.title for column in columns]
    return table(header, lines) + "\n"


def comma_separated(rows: Sequence[Row], columns: Sequence[Column], overrides: Overrides) -> str:
    """Return a table as CSV with the numbers as they were measured; each header names its unit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    for row in rows:
        writer.writerow([_raw(column, value_of(column, row, overrides)) for column in columns])
    return text.getvalue()


def _raw(column: Column, value: Any) -> Any:
    return "" if value is None else value if column.number else column.shown(value)


def metrics(rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, float]:
    """Return {runs.<run>.<metric>: number}, which `dvc metrics` compares by key."""
    return {
        f"runs.{row['run']}.{column.key}": row[column.key]
        for row in rows
        for column in columns
        if column.number and row.get(column.key) is not None
    }
