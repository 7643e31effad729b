"""The budget of the tests: a file that became twice as expensive, or cheap, fails the session."""

import subprocess
import sys
from pathlib import Path

import pytest
from budget import LEAST, faults
from conftest import ROOT

TEST = """
import time

def test_one():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
"""


@pytest.mark.parametrize(
    ("cost", "entry", "said"),
    [
        (LEAST, LEAST, False),
        (LEAST * 5, LEAST * 2, True),
        (LEAST * 1.5, LEAST * 5, True),
        (LEAST / 2, LEAST / 10, False),
        (LEAST, None, False),
    ],
)
def test_a_cost_is_compared_with_its_entry(cost: float, entry: float | None, said: bool) -> None:
    assert bool(faults({"a.py": cost}, {} if entry is None else {"a.py": entry})) is said


@pytest.mark.parametrize(("workers", "entry", "code"), [("0", 0.3, 0), ("0", 0.05, 1), ("1", 0.05, 1), ("0", None, 0)])
def test_a_session_fails_if_an_entry_is_out_of_date(
    tmp_path: Path, workers: str, entry: float | None, code: int
) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    entries = {} if entry is None else {"test_it.py": entry}
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import budget, json, pathlib\n"
        "budget.LEAST, budget.START = 0.1, 0.0\n"
        "budget.FILE = pathlib.Path(__file__).with_name('budget.json')\n"
        f"budget.FILE.write_text(json.dumps({entries!r}))\n"
        "def pytest_addoption(parser): parser.addoption('--write-budget', action='store_true')\n"
        "def pytest_configure(config): config.pluginmanager.register(budget.Budget())\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", workers, "."]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout
