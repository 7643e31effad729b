"""How long the tests take from an empty clone.

    python3 benchmarks/suite.py

Clones the last commit into an empty folder with an empty HOME (pip's cache kept warm, PIP_CACHE_DIR), installs, runs
`make test` and then `make test-fast`, and adds a row to benchmarks/results/suite.json: seconds of each, CPU-seconds of
`make test` without what Slurm's daemons start, and pytest's closing line. Takes about half an hour on two cores, and
says little beside other work.
"""

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from make_run import PRINT_MACHINE, ROOT, make, run

RESULT = ROOT / "benchmarks/results/suite.json"


def main() -> None:
    """Clone, run and add a row."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        run(["git", "clone", "--quiet", str(ROOT), str(clone)], ROOT)
        row: dict[str, Any] = {"commit": run(["git", "rev-parse", "--short", "HEAD"], clone).strip()}
        row["install_seconds"] = round(timed(clone, ".venv/installed")[0])
        before = cpu_seconds()
        seconds, printed = timed(clone, "test")
        row |= {"test_seconds": round(seconds), "test_cpu_seconds": round(cpu_seconds() - before)}
        row["closing_line"] = next(line for line in printed.splitlines()[::-1] if " passed" in line).strip("= ")
        row["fast_seconds"] = round(timed(clone, "test-fast")[0])
        row["machine"] = json.loads(run([clone / ".venv/bin/python", "-c", PRINT_MACHINE], ROOT / "benchmarks"))
    rows = json.loads(RESULT.read_text(encoding="utf-8"))
    RESULT.write_text(json.dumps([*rows, row], indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(row, indent=2))


def timed(clone: Path, target: str) -> tuple[float, str]:
    """Return the seconds that a target of make takes, and what it prints."""
    started = time.monotonic()
    printed = make(clone, target)
    return time.monotonic() - started, printed


def cpu_seconds() -> float:
    """Return the CPU-seconds of the processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
