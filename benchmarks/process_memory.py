"""Measure what a rank's process needs before it loads anything: the estimate's PROCESS_BYTES.

    .venv/bin/python benchmarks/process_memory.py

Writes benchmarks/results/process_memory.json.
"""

import subprocess
import sys
from pathlib import Path

from machine import machine

from zerolora.files import write_json
from zerolora.memory.estimate import PROCESS_BYTES

PROBE = """
import zerolora.train.rank
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")][0])
"""


def main() -> None:
    """Start a process that imports what a rank imports, and write down its resident set."""
    output = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    measured = int(output.split()[-1]) * 1024
    result = {"machine": machine(), "resident_bytes": measured, "PROCESS_BYTES": PROCESS_BYTES}
    write_json(Path("benchmarks/results/process_memory.json"), result)
    print(result)


if __name__ == "__main__":
    main()
