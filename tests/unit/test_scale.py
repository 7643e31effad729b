"""How costs grow with size: what benchmarks/scale.py makes of its figures, and that the docs say what was measured."""

import json
from typing import Any

import scale
from conftest import ROOT

SIZES: list[dict[str, Any]] = json.loads(scale.RESULT.read_text(encoding="utf-8"))["runs"]["sizes"]


def test_a_thousand_runs_are_planned_and_found_done_in_a_minute() -> None:
    thousand = {row["size"]: row for row in SIZES}[1000]
    assert thousand["jobs"] >= 5000
    for figure in ("snakemake_plan", "snakemake_no_op", "dvc_status", "dvc_repro_no_op"):
        assert max(thousand[figure].values()) < 60


def test_the_docs_say_what_was_measured() -> None:
    page, grids = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("scale", "grids"))
    actual = json.loads(scale.RESULT.read_text(encoding="utf-8"))
    assert scale.section(actual) in page and scale.section_of_runs(actual) in grids
    assert actual["prepared_rows"] == scale.prepared_rows()
    assert scale.RESULT.with_suffix(".svg").read_text(encoding="utf-8").rstrip() == scale.chart(actual).svg()


def test_the_cost_of_telemetry_is_of_the_charts() -> None:
    """Loading Vega takes a second. More rows than points of a line take no more of the page."""
    actual = [scale.telemetry(rows) for rows in (30, 300, 3000)]
    assert all(each["charts"]["cpu_seconds"] > 0 for each in actual)
    few, full, many = (each["charts_on_page"]["bytes"] for each in actual)
    assert few < full / 2 and many < 1.1 * full
