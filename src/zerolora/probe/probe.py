"""Measure this machine for the cost model, or the machines of a Slurm job.

    zerolora probe --output FILE [--ranks N]

All ranks of a node measure at once, as they train: a rate is that of a rank whose neighbours are busy. Inside a Slurm
job it is started by srun, once a node or once a rank, as training is (train/launch/launcher.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.files import write_json
from zerolora.train.launch.topology import Topology, topology

POLL_SECONDS = 0.1
TAIL_LINES = 10
LONGEST_SECONDS = 300


def probe(output: Path, device: str, ranks: int) -> None:
    """Measure with `ranks` ranks a node on `device` (cpu or cuda) and write the result to `output`.

    The file holds `device`, `nodes`, `ranks_per_node`, `precision_16bit`, `date`, `hardware`, `versions` and
    `measured`: medians of the slowest rank, with units in their names (probe_rank.py), null for what a machine has
    not. Only the task that holds rank 0 writes. Raises UserError if the machine has not what is asked for; then
    nothing is written.
    """
    _check(output, device, ranks)
    where = topology(os.environ, _nodes(os.environ), ranks)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "probe.json"
        _run(where, ["--output", str(result), "--device", device], device, Path(directory))
        if 0 in where.ranks:
            write_json(output, json.loads(result.read_text()))


def _check(output: Path, device: str, ranks: int) -> None:
    if device not in ("cpu", "cuda"):
        raise UserError(f"device is {shown(device)}; write cpu or cuda")
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; write 1 or more")
    if output.is_dir():
        raise UserError(f"--output {output} is a directory; write a file, as in {output / 'probe.json'}")
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < ranks:
            raise UserError(
                f"--ranks is {ranks}, but this machine shows {torch.cuda.device_count()} GPUs; "
                "write fewer, write device cpu, or run where the GPUs are"
            )


def _nodes(environment: Mapping[str, str]) -> int:
    """Return the nodes of the job step that this process is a task of; 1 outside of one."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return 1
    return int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")))


def _run(where: Topology, arguments: list[str], device: str, logs: Path) -> None:
    """Run probe_rank once for each rank of `where`; the first that fails ends all others."""
    command = [sys.executable, "-m", "zerolora.probe.rank", *arguments]
    running: dict[int, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + LONGEST_SECONDS
    try:
        for rank in where.ranks:
            # As training sets it (train/launch/launcher.py), since what a rank reaches there is what is asked.
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            environment = {**os.environ, **threads}
            if device == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            with _log(logs, rank).open("wb") as log:
                running[rank] = where.start(rank, command, environment, log)
        while any(process.poll() is None for process in running.values()):
            failed = [rank for rank, process in running.items() if process.poll()]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
    finally:
        codes = {rank: process.poll() for rank, process in running.items()}
        for process in running.values():
            process.kill()
            process.wait()
    for rank, code in codes.items():
        if code:
            raise UserError(_failure(rank, code, _log(logs, rank)))
    if None in codes.values():
        raise UserError(f"the probe did not end within {LONGEST_SECONDS} s; is a rank missing, or the network down?")


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def _failure(rank: int, code: int, log: Path) -> str:
    lines: list[Any] = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"the probe's rank {rank} failed with exit code {code}; its last lines:", *lines])
