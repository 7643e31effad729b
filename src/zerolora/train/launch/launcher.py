"""Start training: one process, several on this machine, or one task of a Slurm job of several nodes.

    zerolora train --settings JSON --data … --zero … --weights … --output … --logs …

The same command works everywhere. Started plainly, it starts the run's ranks on this machine. Started by
`srun`, once a node or once a rank, each task finds its place from the job's environment. Started with RANK
set (torchrun, mpirun wrappers), it is that rank.
"""

import math
import os
import signal
import sys
import time
from pathlib import Path

from zerolora.errors import UserError
from zerolora.machine.devices import VISIBLE
from zerolora.train.launch import stop_signals
from zerolora.train.launch.processes import Ranks, check, wait_for
from zerolora.train.launch.topology import Topology

TERM_SECONDS = 25  # from SIGTERM to the end; Slurm's own grace (KillWait) is 30 s
SECOND_CTRL_C = 1  # seconds after the first; within them it is the same one, sent by terminal and parent

# Of CPU ranks, unless the user says otherwise: glibc's caches of freed blocks leave holes that cost up to a third of
# the resident memory and gain no time (docs/memory.md).
CPU_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}

OPENBLAS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
"""Where OpenBLAS, with which training computes nothing, finds its number of threads. Snakemake sets both for a job."""


def launch(where: Topology, arguments: list[str], device: str, logs: Path) -> None:
    """Run `python -m zerolora.train ARGUMENTS` as each rank of `where` and wait for them.

    The node's first rank writes to this process's own output; the others to `logs`/rank<N>.log. When one fails
    the others are ended, and UserError carries the failed rank's last lines. Asked to stop, by a signal, the ranks save
    after their step and Stopped is raised; asked again by Ctrl-C, or too slow for SIGTERM, they are ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    asked = Asked()

    def log_of(rank: int) -> Path | None:
        return None if rank == where.ranks[0] else logs / f"rank{rank}.log"

    def over(ranks: Ranks) -> bool:
        if asked.first:
            ranks.send_signal(stop_signals.ASKED)
        return asked.at_once()

    # Ranks inherit it: one that still loads Python would die of a signal, with a traceback. Here none is lost either.
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.ASKING)
    command = [sys.executable, "-m", "zerolora.train", *arguments]
    ranks = Ranks(where, command, environment_of(device), log_of)
    try:
        asked.listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals.ASKING)
    except BaseException:
        ranks.end()
        raise
    codes = wait_for(ranks, over)
    check(codes, log_of)
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


def environment_of(device: str) -> dict[str, str]:
    """Return the environment of ranks on `device` (cpu or cuda): this process's own, and what must be set before their
    libraries load."""
    # More threads than cores make each rank slower. Fixed at one on CPU, sums are also taken in the same order
    # on every machine, which keeps adapters byte-identical.
    # Threads that OpenBLAS starts when numpy loads would keep ranks from being forks (fork.py).
    # Libraries ask at their import whether there is a GPU: DeepSpeed, and bitsandbytes even if no GPU is visible. torch
    # would answer by a call of CUDA, after which no process can be forked that uses it.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | dict.fromkeys(OPENBLAS, "1")
    environment |= {"DS_ACCELERATOR": device, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return CPU_MALLOC | environment | {VISIBLE: ""} if device == "cpu" else environment
