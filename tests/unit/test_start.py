"""What has nothing to do answers soon: measured by benchmarks/start.py, and what it rests on."""

import json
import subprocess
import sys

from conftest import ROOT

FOUND = json.loads((ROOT / "benchmarks/results/start.json").read_text(encoding="utf-8"))


def test_nothing_to_do_takes_little_more_than_snakemake_itself() -> None:
    assert FOUND["nothing_to_do"]["ratio"] <= 1.2


def test_help_takes_little_more_than_typer_itself() -> None:
    assert FOUND["help"]["ratio"] <= 3


def test_reading_the_config_loads_neither_dvc_nor_the_memory_model() -> None:
    """What the workflow reads at every start (workflow/scripts/startup.py)."""
    code = "\n".join(
        [
            "import sys",
            "import engine_sync",
            "from jobs import Jobs",
            "Jobs()",
            "slow = {'dvc', 'torch', 'transformers', 'rich', 'zerolora.memory.predict', 'zerolora.planner.cost'}",
            "assert not slow & set(sys.modules), slow & set(sys.modules)",
        ]
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
