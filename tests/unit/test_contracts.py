"""Every entry keeps the contract of its registry, as packages test it too (zerolora.testing)."""

import subprocess
import sys
from pathlib import Path

import made_up
import pytest
from conftest import ROOT

from zerolora.registries import entries
from zerolora.testing import CHECKS

ENTRIES = [(group, name) for group in CHECKS for name in entries(group)]


@pytest.mark.parametrize(("group", "name"), ENTRIES)
def test_it_keeps_its_contract(group: str, name: str) -> None:
    CHECKS[group](entries(group)[name])


CODE = f"""
import sys
from pathlib import Path
from zerolora import testing
from zerolora.config.method_sections import MethodSections
from zerolora.registries import entries
NAMES = {made_up.ENTRY_POINTS}
for group, check in testing.CHECKS.items():
    for name in NAMES["zerolora." + group]:
        check(entries(group)[name])
folder = Path(sys.argv[1])
testing.check_tracker(entries("trackers")["jsonl"], folder)
testing.check_method(entries("methods")["narrow"], MethodSections(), Path(sys.argv[2]), folder)
"""


def test_entries_of_another_package_keep_them(tmp_path: Path, tiny_model: Path) -> None:
    installed, folder = made_up.install(tmp_path / "installed"), tmp_path / "folder"
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-c", CODE, str(folder), str(tiny_model)],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{installed}", "PATH": ""},
        check=True,
    )
