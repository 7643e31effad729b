"""What many runs cost: measured by benchmarks/scale_runs.py, as docs/grids.md says."""

import json
import re

from conftest import ROOT
from scale_runs import exponents

FOUND = json.loads((ROOT / "benchmarks/results/scale_runs.json").read_text(encoding="utf-8"))
SIZES = {row["runs"]: row for row in FOUND["sizes"]}


def test_a_thousand_runs_are_planned_and_found_done_in_a_minute() -> None:
    assert SIZES[1000]["jobs"] >= 8000
    assert SIZES[1000]["snakemake_plan"]["cpu_seconds"] < 60
    assert SIZES[1000]["snakemake_no_op"]["cpu_seconds"] < 60


def test_the_docs_say_what_was_measured() -> None:
    text = (ROOT / "docs/grids.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE)
    figures = {command: [cell.strip() for cell in cells.split("|")] for command, cells in rows}
    names = {
        "snakemake --dry-run all": "snakemake_plan",
        "snakemake all": "snakemake_no_op",
        "dvc status": "dvc_status",
        "dvc repro": "dvc_repro_no_op",
        "dvc commit --force": "dvc_commit",
    }
    measured = {
        command: [f"{SIZES[runs][name]['cpu_seconds']:.1f}" if name in SIZES[runs] else "" for runs in sorted(SIZES)]
        for command, name in names.items()
    }
    assert {command: figures[command][: len(SIZES)] for command in names} == measured


def test_the_exponent_is_between_the_two_largest_sizes() -> None:
    rows = [{"runs": runs, "plan": {"cpu_seconds": float(runs * runs)}} for runs in (100, 10, 1)]
    assert exponents([*rows, {"runs": 1000}]) == {"plan": 2.0}
