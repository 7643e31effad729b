"""Start training: one process, several on this machine, or one task of a Slurm job of several nodes.

    zerolora train --settings JSON --data … --zero … --weights … --output … --logs …

The same command works everywhere. Started plainly, it starts the run's ranks on this machine. Started by
`srun`, once a node or once a rank, each task finds its place from the job's environment. Started with RANK
set (torchrun, mpirun wrappers), it is that rank.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from zerolora.errors import UserError
from zerolora.train.launch import stop_signals
from zerolora.train.launch.topology import Topology

TAIL_LINES = 20
POLL_SECONDS = 0.2
TERM_SECONDS = 25  # from SIGTERM to the end; Slurm's own grace (KillWait) is 30 s
SECOND_CTRL_C = 1  # seconds after the first; within them it is the same one, sent by terminal and parent

# Of CPU ranks, unless the user says otherwise: glibc's caches of freed blocks leave holes that cost up to a third of
# the resident memory and gain no time (docs/memory.md).
CPU_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}


def launch(where: Topology, arguments: list[str], device: str, logs: Path) -> None:
    """Run `python -m zerolora.train ARGUMENTS` once for each rank of `where` and wait for them.

    The node's first rank writes to this process's own output; the others to `logs`/rank<N>.log. When one fails
    the others are ended, and UserError carries the failed rank's last lines. Asked to stop, by a signal, the ranks save
    after their step and Stopped is raised; asked again by Ctrl-C, or too slow for SIGTERM, they are ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "zerolora.train", *arguments]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    asked = Asked()
    environment = {**os.environ, **_threads(len(where.ranks))}
    if device == "cpu":
        environment = CPU_MALLOC | environment | {"DS_ACCELERATOR": "cpu"}
    # Ranks inherit it: one that still loads Python would die of a signal, with a traceback. Here none is lost either.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.ASKING)
    try:
        for rank in where.ranks:
            if rank == where.ranks[0]:
                processes[rank] = where.start(rank, command, environment)
            else:
                with _log(logs, rank).open("wb") as log:
                    processes[rank] = where.start(rank, command, environment, log)
        asked.listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals.ASKING)
        while any(process.poll() is None for process in processes.values()):
            failed = [
                rank for rank, process in processes.items() if process.poll() not in (None, 0, stop_signals.STOPPED)
            ]
            if failed or asked.at_once():
                break
            if asked.first:
                for process in processes.values():
                    process.send_signal(stop_signals.ASKED)
            time.sleep(POLL_SECONDS)
    finally:
        codes = {rank: process.poll() for rank, process in processes.items()}
        _end(processes)
    failed = [rank for rank, code in codes.items() if code not in (None, 0, stop_signals.STOPPED)]
    if failed:
        raise UserError(_failure(failed[0], codes[failed[0]], _log(logs, failed[0])))
    if asked.first and any(code is None for code in codes.values()):
        raise UserError(f"training was ended by {asked.first.name}; run the same command to go on from its checkpoint")
    if stop_signals.STOPPED in codes.values():
        raise stop_signals.Stopped("training was asked to stop; run the same command to go on")


class Asked:
    """What this process was asked by signals: to stop after the step, or at once."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.deadline = math.inf
        self._interrupted = math.inf

    def listen(self) -> None:
        """Take signals from now on."""
        for number in stop_signals.ASKING:
            signal.signal(number, self._take)

    def at_once(self) -> bool:
        """Tell whether there is no more time."""
        return time.monotonic() >= self.deadline

    def _take(self, number: int, _: object) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted > SECOND_CTRL_C:
            self.deadline = now
        if number == signal.SIGINT:
            self._interrupted = min(self._interrupted, now)
        if number == signal.SIGTERM:
            self.deadline = min(self.deadline, now + TERM_SECONDS)
        self.first = self.first or signal.Signals(number)


def _failure(rank: int, code: int | None, log: Path) -> str:
    reason = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.is_file() else []
    return "\n".join(
        [
            f"rank {rank} failed with {reason}; its last lines:" if lines else f"rank {rank} failed with {reason}",
            *lines,
        ]
    )


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def _end(processes: Mapping[int, "subprocess.Popen[bytes]"]) -> None:
    """End ranks at once: with one of them gone, the others wait in a collective and could not save."""
    for process in processes.values():
        process.kill()
        process.wait()


def _threads(ranks: int) -> dict[str, str]:
    # More threads than cores make each rank slower. Fixed at one on CPU, sums are also taken in the same order
    # on every machine, which keeps adapters byte-identical.
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if ranks else {}
