"""Measure the memory of a rank's process before it loads anything, and of the processes beside it.

    .venv/bin/python benchmarks/process_memory.py [PYTHON]

Writes benchmarks/results/process_memory.json: the resident bytes of a process (the estimate's PROCESS_BYTES), and of
the processes beside the ranks on the first node of a Slurm job (reserve.py's JOB_BYTES). With PYTHON, an interpreter
whose torch is the CUDA build, also the resident bytes of its process (reserve.py's CUDA_BYTES).
"""

import sys
from pathlib import Path

from measuring import RESULTS, ROOT, machine, timed

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
from zerolora.compat.left_out import leave_out
leave_out("torchao")
import datasets, zerolora.train.rank
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")][0])
"""


def main() -> None:
    """Start each of these processes and write its resident set."""
    result = {
        "machine": machine(),
        "resident_bytes": reported([sys.executable, "-c", PROBE]),
        "PROCESS_BYTES": PROCESS_BYTES,
        "beside_bytes": 2 * peak_bytes(SNAKEMAKE) + peak_bytes(LAUNCHER),
        "JOB_BYTES": JOB_BYTES,
        "CUDA_BYTES": CUDA_BYTES,
    }
    if len(sys.argv) > 1:
        result["cuda_resident_bytes"] = reported([sys.argv[1], "-c", PROBE])
    write_json(RESULTS / "process_memory.json", result)
    print(result)


def reported(command: list[str]) -> int:
    """Return the kB at the end of a command's output, in bytes."""
    return int(timed(command, ROOT).stdout.split()[-1]) * 1024


def peak_bytes(command: list[str]) -> int:
    """Return the peak of a command's process. A small process starts it: a new process counts its parent's memory."""
    return reported([sys.executable, "-c", PEAK, *command])


if __name__ == "__main__":
    main()
