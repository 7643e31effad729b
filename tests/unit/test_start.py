"""What has nothing to do answers soon: measured by benchmarks/start.py, and what it rests on."""

import json
import re
import subprocess
import sys

from conftest import ROOT

FOUND = json.loads((ROOT / "benchmarks/results/start.json").read_text(encoding="utf-8"))


def test_nothing_to_do_takes_little_more_than_snakemake_itself() -> None:
    assert FOUND["nothing_to_do"]["ratio"] <= 1.2


def test_help_takes_little_more_than_typer_itself() -> None:
    assert FOUND["help"]["ratio"] <= 3


def test_reading_the_config_loads_neither_dvc_nor_the_memory_model() -> None:
    """What workflow/rules/common.smk imports at every start."""
    text = (ROOT / "workflow/rules/common.smk").read_text(encoding="utf-8")
    imports = re.findall(r"^(?:import|from) zerolora[^\n(]*(?:\([^)]*\))?", text, re.MULTILINE)
    assert imports
    code = "\n".join(
        [
            "import sys",
            *imports,
            "slow = {'dvc', 'torch', 'transformers', 'rich', 'zerolora.memory.predict', 'zerolora.planner.cost'}",
            "assert not slow & set(sys.modules), slow & set(sys.modules)",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
