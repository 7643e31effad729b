"""What each file of tests costs in CPU-seconds, compared with tests/budget.json: a pytest plugin.

After a run of whole files, a file that cost more than twice its entry, or less than half of it, fails the session:
either a test has become expensive by mistake, or the entry is out of date. `--write-budget` writes the entries of the
files that ran; a file without an entry is not compared. CPU-seconds of this process, of the children it waited for and
of what fork servers run are counted, since machines are shared and wall time says little. So do CPU-seconds of another
machine, or of cores with other work beside: where enough files ran, costs are compared at the median of their ratios.
"""

import json
import os
import statistics
from collections.abc import Generator
from pathlib import Path

import pytest
from fork_server import SERVERS

FILE = Path(__file__).with_name("budget.json")
PROPERTY = "cpu_seconds"
FACTOR = 2.0
LEAST = 20.0
"""CPU-seconds; cheaper files are not compared."""
ENOUGH = 10
"""Files of which the median of cost over entry says how fast this machine is."""


def cpu_seconds() -> float:
    """Return the CPU-seconds of this process, of the children it has waited for, and of the fork servers."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + SERVERS.cpu_seconds()


def faults(costs: dict[str, float], budget: dict[str, float]) -> list[str]:
    """Return a line for each file whose cost, at the machine's speed, is not within a factor of its entry."""
    ratios = [
        cost / budget[file]
        for file, cost in costs.items()
        if max(cost, budget.get(file, 0.0)) >= LEAST and file in budget
    ]
    slower = statistics.median(ratios) if len(ratios) >= ENOUGH else 1.0
    lines = []
    for file, seconds in sorted(costs.items()):
        cost, entry = seconds / slower, budget.get(file)
        if max(cost, entry or 0.0) < LEAST:
            continue
        if entry is not None and not entry / FACTOR <= cost <= entry * FACTOR:
            lines.append(f"{file}: {cost:.0f} CPU-seconds where tests/budget.json says {entry:.0f}")
    return lines


class Budget:
    """Measures each test with its fixtures, and adds the costs up by file."""

    def __init__(self) -> None:
        self.before = 0.0
        self.costs: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        """Begin to measure."""
        self.before = cpu_seconds()
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        """Hand the cost on with the test's last report, which a worker sends to the session."""
        yield
        item.user_properties.append((PROPERTY, cpu_seconds() - self.before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what was reported."""
        if report.when == "teardown":
            file = report.nodeid.split("::")[0]
            self.costs[file] = self.costs.get(file, 0.0) + sum(
                float(str(value)) for name, value in report.user_properties if name == PROPERTY
            )

    @staticmethod
    def _partial(config: pytest.Config) -> bool:
        """Return whether some file was not run whole. With workers, only they know what was deselected."""
        chosen = any(config.getoption(name, False) for name in ("keyword", "markexpr", "deselect", "lf"))
        return chosen or "::" in " ".join(config.args)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare the costs with their entries, or write them."""
        budget: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
        if hasattr(session.config, "workerinput") or not self.costs:
            return
        if session.config.getoption("--write-budget"):
            budget |= {file: round(cost, 1) for file, cost in self.costs.items() if cost >= LEAST / FACTOR}
            FILE.write_text(json.dumps(budget, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        elif session.exitstatus == 0 and not self._partial(session.config):
            lines = faults(self.costs, budget)
            if lines:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                print("\n".join(["", *lines, "find out why; if it is meant: pytest --write-budget FILE"]))
