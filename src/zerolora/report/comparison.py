"""Put all runs into one table: a page, Markdown, CSV and metrics.

zerolora compare --settings JSON --output results/compare   the stage, of finished runs
zerolora compare                                            by hand, of what is there
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolora.config.settings import CompareSettings
from zerolora.files import write_json, write_text
from zerolora.log import result
from zerolora.report.comparison_columns import columns_of
from zerolora.report.comparison_page import page
from zerolora.report.comparison_rows import Row, finished, what_is_there
from zerolora.report.comparison_texts import comma_separated, markdown, metrics

PAGE = "index.html"


def compare(settings: CompareSettings, folder: Path, output: Path) -> None:
    """Write the comparison of finished runs, whose rows are in `folder`, to `output`.

    Rows of runs that the config no longer has are removed: DVC compares the whole folder. Raises UserError if the row
    of a run is missing.
    """
    rows = finished(settings.runs, folder)
    for stale in {path for path in folder.glob("*.json") if path.stem not in settings.runs}:
        stale.unlink()
    links = {run: f"../{run}/report.html" for run in settings.runs}
    _write(rows, settings.runs, links, output, partial=False)
    result(told(rows))


def compare_what_is_there(results: Path, output: Path, outdated: Mapping[str, str] | None = None) -> str:
    """Write the comparison of all runs of the config, finished or not, to `output`, and return a line about it.

    `outdated` as in `rows.what_is_there`. Raises UserError if a file of `results` is broken.
    """
    rows, overrides = what_is_there(results, outdated)
    pages = {row["run"]: results / row["run"] / "report.html" for row in rows if "curve" in row}
    links = {run: Path(os.path.relpath(path, output)).as_posix() for run, path in pages.items() if path.is_file()}
    _write(rows, overrides, links, output, partial=True)
    return f"{output / PAGE}: {told(rows)}"


def told(rows: Sequence[Row]) -> str:
    """Return how many runs there are, by status, as in `8 runs: 7 done, 1 refused`."""
    counts = Counter(row["status"] for row in rows)
    parts = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    return f"{len(rows)} run{'s' * (len(rows) != 1)}: {parts}"


def _write(
    rows: Sequence[Row],
    overrides: Mapping[str, Mapping[str, Any]],
    links: Mapping[str, str],
    output: Path,
    *,
    partial: bool,
) -> None:
    columns = columns_of(rows, overrides)
    readable = [column for column in columns if not column.table_only]
    write_json(output / "metrics.json", metrics(rows, columns))
    write_text(output / "table.csv", comma_separated(rows, columns, overrides))
    write_text(output / "table.md", markdown(rows, readable, overrides))
    write_text(output / PAGE, page(rows, readable, overrides, links, partial))
