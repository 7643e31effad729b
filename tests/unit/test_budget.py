"""The budget of the tests: a file that became twice as expensive, or cheap, fails the session."""

import json

import budget
import pytest
from budget import FACTOR, LEAST, faults
from conftest import ROOT

pytest_plugins = ["pytester"]
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
        (LEAST * FACTOR * 1.1, LEAST, True),
        (LEAST, LEAST * FACTOR * 1.1, True),
        (LEAST / 2, LEAST / 10, False),
        (LEAST, None, False),
    ],
)
def test_a_cost_is_compared_with_its_entry(cost: float, entry: float | None, said: bool) -> None:
    assert bool(faults({"a.py": cost}, {} if entry is None else {"a.py": entry})) is said


@pytest.mark.parametrize(("workers", "entry", "code"), [("0", 0.3, 0), ("0", 0.05, 1), ("1", 0.05, 1), ("0", None, 0)])
def test_a_session_fails_if_an_entry_is_out_of_date(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str, entry: float | None, code: int
) -> None:
    """Sessions of this process; the one with a worker has that in a process of its own."""
    pytester.makepyfile(test_it=TEST)
    monkeypatch.setattr(budget, "LEAST", 0.1)
    monkeypatch.setattr(budget, "FILE", pytester.path / "budget.json")
    budget.FILE.write_text(json.dumps({} if entry is None else {"test_it.py": entry}))
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import budget\n"
        "def pytest_addoption(parser): parser.addoption('--write-budget', action='store_true')\n"
        "def pytest_configure(config): config.pluginmanager.register(budget.Budget())\n"
    )
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "--numprocesses", workers, ".")
    assert result.ret == code, result.outlines
    # Of files that are run in part nothing can be said, as with make test-fast.
    assert pytester.runpytest_inprocess("-q", "--numprocesses", workers, "-k", "one").ret == 0
