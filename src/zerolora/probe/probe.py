"""Measure this machine, or the nodes of a Slurm job, for the cost model.

    zerolora probe --output FILE [--ranks N]

All ranks of a node measure at the same time, so each rate is that of a rank with busy neighbours, as in training.
Inside a Slurm job, start it with srun, one task for each node or for each rank, like training.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from zerolora.errors import UserError, shown
from zerolora.files import write_json
from zerolora.machine import devices
from zerolora.train.launch.launcher import Ranks, check, environment_of, wait_for
from zerolora.train.launch.topology import Topology, topology

LONGEST_SECONDS = 300


def probe(output: Path, device: str, ranks: int) -> None:
    """Measure with `ranks` ranks on each node on `device` (cpu or cuda) and write the result to `output`.

    The file holds `device`, `nodes`, `ranks_per_node`, `precision_16bit`, `date`, `hardware`, `versions` and
    `measured`: medians of the slowest rank, with units in their names (probe_rank.py), and null for links that the
    machine lacks. Only the task with rank 0 writes. Raises UserError if `device` or `ranks` is not available.
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"device is {shown(device)}; use cpu or cuda")
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; use 1 or more")
    if output.is_dir():
        raise UserError(f"--output {output} is a directory; give a file, as in {output / 'probe.json'}")
    where = topology(os.environ, _nodes(os.environ), ranks)
    if device == "cuda" and (reason := devices.fault(len(where.ranks), "--device cpu")):
        raise UserError(f"--device is cuda, but {reason}")
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "probe.json"
        _run(where, result, device)
        if 0 in where.ranks:
            write_json(output, json.loads(result.read_text()))


def _nodes(environment: Mapping[str, str]) -> int:
    """Return the number of nodes of this process's Slurm step; 1 outside of a step."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return 1
    return int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")))


def _run(where: Topology, result: Path, device: str) -> None:
    """Run the probe's process for each rank in `where`. If one fails, all others are terminated."""
    deadline = time.monotonic() + LONGEST_SECONDS

    def log_of(rank: int) -> Path:
        return result.with_name(f"rank{rank}.log")

    command = [sys.executable, "-m", "zerolora.probe.probe_rank", "--output", str(result), "--device", device]
    ranks = Ranks(where, command, environment_of(device), log_of)
    codes = wait_for(ranks, lambda _: time.monotonic() > deadline)
    check(codes, log_of, "the probe's rank")
    if None in codes.values():
        raise UserError(f"the probe did not end within {LONGEST_SECONDS} s; is a rank missing, or the network down?")
