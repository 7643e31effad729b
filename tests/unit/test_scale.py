"""Measured start-up and growth (benchmarks/start.py, benchmarks/scale.py): bounds, and the docs' figures."""

import json
import subprocess
import sys
from typing import Any

import scale
from conftest import ROOT

SIZES: list[dict[str, Any]] = json.loads(scale.RESULT.read_text(encoding="utf-8"))["runs"]["sizes"]


def test_1000_runs_are_planned_in_a_minute() -> None:
    thousand = {row["size"]: row for row in SIZES}[1000]
    assert thousand["jobs"] >= 5000
    for figure in ("snakemake_plan", "snakemake_no_op", "dvc_status", "dvc_repro_no_op"):
        assert max(thousand[figure].values()) < 60


def test_docs_have_the_measured_figures() -> None:
    page, grids = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("scale", "grids"))
    actual = json.loads(scale.RESULT.read_text(encoding="utf-8"))
    assert scale.section(actual) in page and scale.section_of_runs(actual) in grids
    assert actual["prepared_rows"] == scale.prepared_rows()
    assert scale.RESULT.with_suffix(".svg").read_text(encoding="utf-8").rstrip() == scale.chart(actual).svg()


def test_start_up_takes_little_more_than_snakemake_and_typer() -> None:
    measured = json.loads((ROOT / "benchmarks/results/start.json").read_text(encoding="utf-8"))
    assert measured["nothing_to_do"]["ratio"] <= 1.2
    assert measured["help"]["ratio"] <= 3


def test_reading_the_config_imports_neither_dvc_nor_torch() -> None:
    """The modules of every start of the workflow (workflow/scripts/startup.py)."""
    code = (
        "import sys, engine_sync; from jobs import Jobs; Jobs(); "
        "slow = {'dvc', 'torch', 'transformers', 'rich', 'zerolora.memory.predict', 'zerolora.planner.cost'}; "
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'workflow/scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
