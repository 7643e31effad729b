"""A comparison as a page: the table first, then the charts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerolora.report.comparison_charts import sections
from zerolora.report.comparison_columns import ACCURACY, FIGURES, RUN, STATUS, Column, cell, value_of
from zerolora.report.comparison_rows import Row
from zerolora.report.html import render

COLOURS = {"done": "good", "failed": "bad", "refused": "bad", "not run": "quiet"}
TILES = {"accuracy": max, "loss": min, "step_seconds": min, "measured_gpu_bytes": min, "measured_host_bytes": min}
"""Figures whose best run stands above the table."""
FOUR = 4


@dataclass(frozen=True)
class Cell:
    """A cell of the page's table."""

    text: str
    value: float | None = None
    """What a number sorts by."""
    css: str = ""
    link: str = ""
    tag: str = "td"


def page(
    rows: Sequence[Row],
    columns: Sequence[Column],
    overrides: Mapping[str, Mapping[str, Any]],
    links: Mapping[str, str],
    partial: bool,
) -> str:
    """Return the page. `links` has, by run, where its own page is; `partial`: runs may be unfinished."""
    counts = Counter(row["status"] for row in rows)
    return render(
        "comparison.html",
        rows=rows,
        columns=columns,
        table_rows=[[_cell(column, row, overrides, links) for column in columns] for row in rows],
        tiles=_tiles(rows),
        counts=[f"{count} {status}" for status, count in counts.most_common()],
        explained=[column for column in columns if column.says],
        sections=sections(rows),
        partial=partial,
    )


def _cell(column: Column, row: Row, overrides: Mapping[str, Mapping[str, Any]], links: Mapping[str, str]) -> Cell:
    text = cell(column, row, overrides)
    if column is RUN:
        return Cell(text, link=links.get(row["run"], ""), tag="th")
    if column is STATUS:
        return Cell(text, css=COLOURS.get(row["status"], ""))
    return Cell(text, value_of(column, row, overrides), "number") if column.number else Cell(text)


def _tiles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return the best of each of TILES, if several runs can be compared."""
    result = []
    titles = {column.key: column for column in FIGURES}
    for key, lowest in TILES.items():
        known = [row for row in rows if row.get(key) is not None]
        if len(known) > 1:
            best = lowest(known, key=lambda row: row[key])
            word = "highest" if key == ACCURACY.key else "shortest" if key == "step_seconds" else "lowest"
            result.append((f"{word} {titles[key].title}", titles[key].shown(best[key]), best["run"]))
    return result[:FOUR]
