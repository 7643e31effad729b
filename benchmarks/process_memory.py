"""Measure what a rank's process needs before it loads anything, the estimate's PROCESS_BYTES, and what runs beside the
ranks on the first node of a Slurm job: headroom.py's JOB_BYTES.

    .venv/bin/python benchmarks/process_memory.py

Writes benchmarks/results/process_memory.json. With another PYTHON, whose torch is the CUDA build, also what its process
needs (headroom.py's CUDA_BYTES): benchmarks/process_memory.py PYTHON
"""

import subprocess
import sys
from pathlib import Path

from machine import machine

from zerolora.files import write_json
from zerolora.memory.host import PROCESS as PROCESS_BYTES
from zerolora.memory.reserve import CUDA_BYTES, JOB_BYTES

# A job is a Snakemake that starts a Snakemake that starts the launcher.
SNAKEMAKE = [str(Path(sys.executable).with_name("snakemake")), "--profile", "profiles/local", "--dry-run", "all"]
LAUNCHER = [sys.executable, "-c", "import zerolora.cli, zerolora.train.launch.launcher"]
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
PROBE = """
from zerolora.compat import torchao_patches
torchao_patches.hide()
import datasets, zerolora.train.rank
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")][0])
"""


def main() -> None:
    """Start each of these processes, and write down its resident set."""
    measured = resident_bytes(sys.executable)
    beside = 2 * peak_bytes(SNAKEMAKE) + peak_bytes(LAUNCHER)
    result = {
        "machine": machine(),
        "resident_bytes": measured,
        "PROCESS_BYTES": PROCESS_BYTES,
        "beside_bytes": beside,
        "JOB_BYTES": JOB_BYTES,
        "CUDA_BYTES": CUDA_BYTES,
    }
    if len(sys.argv) > 1:
        result["cuda_resident_bytes"] = resident_bytes(sys.argv[1])
    write_json(Path("benchmarks/results/process_memory.json"), result)
    print(result)


def resident_bytes(python: str) -> int:
    """Return what a rank's process of this interpreter holds, once it has imported its libraries."""
    output = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    return int(output.split()[-1]) * 1024


def peak_bytes(command: list[str]) -> int:
    """Return the most that a command's process held. A small process starts it: a new process counts its parent's."""
    output = subprocess.run([sys.executable, "-c", PEAK, *command], capture_output=True, text=True, check=True).stdout
    return int(output.split()[-1]) * 1024


if __name__ == "__main__":
    main()
