"""Compare all runs in one table: an HTML page, Markdown, CSV, and metrics for DVC.

zerolora stage compare   the stage: finished runs only
zerolora compare         on request: all runs, finished or not
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerolora.config.settings import CompareSettings
from zerolora.files import write_json, write_text
from zerolora.log import result
from zerolora.report.comparison_charts import sections
from zerolora.report.comparison_columns import (
    ACCURACY,
    FIGURES,
    RUN,
    STATUS,
    Column,
    Overrides,
    cell,
    columns_of,
    value_of,
)
from zerolora.report.comparison_rows import Row, all_runs, finished
from zerolora.report.html import render
from zerolora.report.markdown import Written, code, table
from zerolora.report.repeats import RepeatedFigure, figures, metrics, table_of, verdicts
from zerolora.units import counted

PAGE = "index.html"
COLOURS = {"done": "good", "failed": "bad", "refused": "bad", "not run": "quiet"}
TILES = {"accuracy": max, "loss": min, "step_seconds": min, "measured_gpu_bytes": min, "measured_host_bytes": min}
"""Figures whose best run is shown above the table."""
MOST_TILES = 4


def compare(settings: CompareSettings, folder: Path, output: Path) -> None:
    """Write the comparison of finished runs, whose rows are in `folder`, to `output`.

    Removes the rows of runs that are no longer in the config, since DVC compares the whole folder. Raises UserError if
    the row of a run is missing.
    """
    rows = finished(settings.runs, folder)
    for stale in {path for path in folder.glob("*.json") if path.stem not in settings.runs}:
        stale.unlink()
    links = {run: f"../{run}/report.html" for run in settings.runs}
    _write(rows, settings.runs, links, output, partial=False)
    result(_status_counts(rows))


def compare_all(results: Path, output: Path, outdated: Mapping[str, str] | None = None) -> str:
    """Write the comparison of all runs of the config, finished or not, to `output`, and return a line about it.

    `outdated`: see `comparison_rows.all_runs`. Raises UserError if a file of `results` is broken.
    """
    rows, overrides = all_runs(results, outdated)
    pages = {row["run"]: results / row["run"] / "report.html" for row in rows if "curve" in row}
    links = {run: Path(os.path.relpath(path, output)).as_posix() for run, path in pages.items() if path.is_file()}
    _write(rows, overrides, links, output, partial=True)
    return f"{output / PAGE}: {_status_counts(rows)}"


def _status_counts(rows: Sequence[Row]) -> str:
    """Return the number of runs by status, as in `8 runs: 7 done, 1 refused`."""
    counts = Counter(row["status"] for row in rows)
    parts = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{counted(len(rows), 'run')}: {parts}"


def _write(rows: Sequence[Row], overrides: Overrides, links: Mapping[str, str], output: Path, *, partial: bool) -> None:
    columns = columns_of(rows, overrides)
    readable = [column for column in columns if not column.table_only]
    repeated = figures(rows, readable, overrides)
    of_runs = {
        f"runs.{row['run']}.{column.key}": row[column.key]
        for row in rows
        for column in columns
        if column.number and row.get(column.key) is not None
    }
    write_json(output / "metrics.json", of_runs | metrics(repeated))
    write_text(output / "table.csv", _csv(rows, columns, overrides))
    write_text(output / "table.md", _markdown(rows, readable, overrides, repeated))
    write_text(output / PAGE, _page(rows, readable, overrides, links, repeated, partial))


def _csv(rows: Sequence[Row], columns: Sequence[Column], overrides: Overrides) -> str:
    """Return a table as CSV. Numbers are not rounded; the headers name the units."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    for row in rows:
        values = ((column, value_of(column, row, overrides)) for column in columns)
        writer.writerow(
            "" if value is None else value if column.number else column.text(value) for column, value in values
        )
    return text.getvalue()


def _markdown(
    rows: Sequence[Row], columns: Sequence[Column], overrides: Overrides, repeated: Sequence[RepeatedFigure]
) -> str:
    """Return a table of the runs as Markdown, and one of those with repeats. Text is escaped."""

    def written(column: Column, row: Row) -> Written:
        text = cell(column, row, overrides)
        return Written(text if column.number or not text or column.key == "status" else code(text))

    header = [code(column.title) if "." in column.title else column.title for column in columns]
    text = table(header, [[written(column, row) for column in columns] for row in rows]) + "\n"
    if repeated:
        titles, *lines = table_of(repeated)
        text += "\n" + table(titles, [[Written(code(line[0])), *map(Written, line[1:])] for line in lines]) + "\n"
        text += "".join(f"\n{verdict}\n" for verdict in verdicts(repeated))
    return text


@dataclass(frozen=True)
class Cell:
    """A cell of the page's table."""

    text: str
    value: float | None = None
    """The number to sort by."""
    css: str = ""
    link: str = ""
    heads: bool = False
    """Whether it is the header of its row."""


def _page(
    rows: Sequence[Row],
    columns: Sequence[Column],
    overrides: Overrides,
    links: Mapping[str, str],
    repeated: Sequence[RepeatedFigure],
    partial: bool,
) -> str:
    """Return the page. `links` has the address of each run's page; `partial`: runs may be unfinished."""

    def html_cell(column: Column, row: Row) -> Cell:
        text = cell(column, row, overrides)
        if column is RUN:
            return Cell(text, link=links.get(row["run"], ""), heads=True)
        if column is STATUS:
            return Cell(text, css=COLOURS.get(row["status"], ""))
        return Cell(text, value_of(column, row, overrides), "number") if column.number else Cell(text)

    counts = Counter(row["status"] for row in rows)
    return render(
        "comparison.html",
        rows=rows,
        columns=columns,
        table_rows=[[html_cell(column, row) for column in columns] for row in rows],
        tiles=_tiles(rows, {figure.column.key: figure for figure in repeated}),
        repeats=table_of(repeated) if repeated else [],
        verdicts=verdicts(repeated),
        judged=sum(row.get(ACCURACY.key) is not None for row in rows),
        counts=[f"{count} {status}" for status, count in counts.most_common()],
        explained=[column for column in columns if column.explanation],
        sections=sections(rows),
        partial=partial,
    )


def _tiles(rows: Sequence[Row], repeated: Mapping[str, RepeatedFigure]) -> list[tuple[str, str, str]]:
    """Return title, best figure and its run for each of TILES that at least two runs have. A figure of which there are
    repeats is the best mean, and left out if seeds do not tell it from another one."""
    result = []
    columns = {column.key: column for column in FIGURES}
    for key, best_of in TILES.items():
        known = [row for row in rows if row.get(key) is not None]
        if len(known) > 1:
            best = best_of(known, key=lambda row: row[key])
            word = "highest" if key == ACCURACY.key else "shortest" if key == "step_seconds" else "lowest"
            value, name = best[key], best["run"]
            if key in repeated:
                group = repeated[key].best()
                if group is None or not repeated[key].of_all or repeated[key].as_good():
                    continue
                value, name = group.mean, f"{group.name}, mean of {counted(len(group.values), 'seed')}"
            result.append((f"{word} {columns[key].title}", columns[key].text(value), name))
    return result[:MOST_TILES]
