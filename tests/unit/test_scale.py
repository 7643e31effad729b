"""How costs grow with size: what benchmarks/scale.py makes of its figures, and that the docs say what was measured."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import scale
import scale_runs
import scale_telemetry
from conftest import ROOT

SIZES: list[dict[str, Any]] = json.loads(scale.RESULT.read_text(encoding="utf-8"))["runs"]["sizes"]


def made_up() -> scale.Found:
    """Return a result whose plan grows with the square of the runs; DVC was not asked at the largest size."""

    def seconds(cpu: float) -> dict[str, float]:
        return {"cpu_seconds": cpu, "wall_seconds": 2 * cpu}

    runs: list[dict[str, Any]] = [{"size": size, "snakemake_plan": seconds(size**2 / 100)} for size in (10, 100, 1000)]
    runs[0]["dvc_status"] = seconds(1.0)
    rows = [{"size": size, "charts": seconds(size / 1000), "charts_on_page": {"bytes": 9000}} for size in (100, 1000)]
    machine = {"cores": 2, "processor": "made up", "date": "2026-11-25"}
    found = {"runs": runs, "data_sets": runs[:1], "telemetry_rows": rows}
    grown = {name: {"sizes": sizes, "exponents": scale.exponents(sizes)} for name, sizes in found.items()}
    return {"machine": machine, **grown, "prepared_rows": scale.prepared_rows()}


def test_a_thousand_runs_are_planned_and_found_done_in_a_minute() -> None:
    thousand = {row["size"]: row for row in SIZES}[1000]
    assert thousand["jobs"] >= 5000
    for figure in ("snakemake_plan", "snakemake_no_op", "dvc_status", "dvc_repro_no_op"):
        assert max(thousand[figure].values()) < 60


def test_the_docs_say_what_was_measured() -> None:
    page, grids = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("scale", "grids"))
    assert scale_runs.table(SIZES) in grids
    found = json.loads(scale.RESULT.read_text(encoding="utf-8"))
    assert scale.section(found) in page and scale.section_of_runs(found) in grids
    assert found["prepared_rows"] == scale.prepared_rows()
    assert scale.RESULT.with_suffix(".svg").read_text(encoding="utf-8").rstrip() == scale.chart(found).svg()


def test_the_exponent_is_between_the_two_largest_sizes_that_were_measured() -> None:
    found = made_up()
    assert found["runs"]["exponents"] == {"snakemake_plan": 2.0}
    assert found["telemetry_rows"]["exponents"] == {"charts": 1.0, "charts_on_page": 0.0}
    few, many = found["prepared_rows"]["sizes"][-2:]
    assert many["size"] == 10 * few["size"]
    assert 10 ** found["prepared_rows"]["exponents"]["prepare"] * few["prepare"]["wall_seconds"] == pytest.approx(
        many["prepare"]["wall_seconds"], rel=0.02
    )


def test_the_table_has_the_sizes_that_were_measured() -> None:
    text = scale.section(made_up())
    assert "| runs of a grid | `snakemake --dry-run all` | 10 / 100 / 1,000 | 1 / 100 / 10,000 |" in text
    assert "| runs of a grid | `dvc status` | 10 | 1 | 2 |  |" in text
    assert (
        "9 / 9 kB of the page (exponent 0.0)" in " ".join(text.split())
        and "2026-11-25" in text
        and scale.prepared_rows()["machine"]["date"] in text
    )


def test_each_line_is_drawn_on_white() -> None:
    picture = scale.chart(made_up()).svg()
    assert all(line in picture for line in scale.LINES.values())
    assert 'fill="white"' in picture


def test_telemetry_has_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    table = tmp_path / "telemetry.csv"
    scale_telemetry.write(table, 250)
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [int(row["step"]) for row in rows] == [*range(1, 251)]
    assert rows[100] | {"step": ""} == rows[0] | {"step": ""} != rows[1] | {"step": ""}


def test_the_cost_of_telemetry_is_of_the_charts() -> None:
    """Loading Vega takes a second. More rows than points of a line take no more of the page."""
    found = [scale_telemetry.measure(rows) for rows in (30, 300, 3000)]
    assert all(each["charts"]["cpu_seconds"] > 0 for each in found)
    few, full, many = (each["charts_on_page"]["bytes"] for each in found)
    assert few < full / 2 and many < 1.1 * full
