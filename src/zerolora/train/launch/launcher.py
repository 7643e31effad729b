"""Start training: as one process, as several on this machine, or as one task of a Slurm job of several nodes.

    zerolora stage train RUN

By itself, it starts the run's ranks on this machine. Under `srun` or another launcher, once a node or once a rank, each
task gets its ranks from the environment (topology.py). With RANK set (torchrun, wrappers), it is that rank.

Several ranks are forks of one process that loads their libraries once (fork.py); they become children of this process,
which temporarily reaps that process's orphans. A single rank, or ranks without Linux's prctl, are separate processes.
"""

import contextlib
import ctypes
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from zerolora.errors import UserError
from zerolora.log import PREFIX
from zerolora.machine import devices
from zerolora.machine.devices import VISIBLE
from zerolora.train.launch.fork import REQUEST, Request
from zerolora.train.launch.stop_signals import ASKED, ASKING, STOPPED, Stopped
from zerolora.train.launch.topology import FOREIGN, Topology

TERM_SECONDS = 25  # from SIGTERM to the end; Slurm's own grace (KillWait) is 30 s
SECOND_CTRL_C = 1  # seconds after the first; within them both are the same one, from terminal and parent
POLL_SECONDS = 0.1
CAUSE_SECONDS = 2.0
"""How long a failed rank's peers may take to end: the kernel closes a killed process's connections, on which its peers
fail, before it reports the process."""
TAIL_LINES = 20
MISTAKE = 2
"""Exit code of a rank that ended with UserError."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER (man 2 prctl)

# Of CPU ranks, unless the user sets it: glibc's caches of freed blocks leave holes of up to a third of the resident
# memory and save no time (docs/memory.md).
CPU_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}

OPENBLAS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
"""Number of threads of OpenBLAS, which training does not use. Snakemake sets both for a job."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch's settings of its allocator; the first is the current name (c10/core/AllocatorConfig.h)."""
GROWING_SEGMENTS = "expandable_segments:True"
"""Has torch map GPU memory into segments that grow: steps of different lengths leave fewer gaps."""

Codes = dict[int, int | None]
"""Exit code by rank; negative, the signal that ended it; None while it runs."""
Logs = Callable[[int], Path | None]
"""The file of a rank's output; None for this process's own output."""


def launch(where: Topology, arguments: list[str], device: str, logs: Path) -> None:
    """Run `python -m zerolora.train ARGUMENTS` as each rank of `where` and wait for them.

    The node's first rank writes to this process's own output, the others to `logs`/rank<N>.log. When one fails, the
    others are killed, and UserError has the failed rank's last lines. On a stop signal the ranks save after their step,
    and Stopped is raised; after a second Ctrl-C, or TERM_SECONDS after SIGTERM, they are killed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    asked = Asked()

    def log_of(rank: int) -> Path | None:
        return None if rank == where.ranks[0] else logs / f"rank{rank}.log"

    def over(ranks: Ranks) -> bool:
        if asked.first:
            ranks.send_signal(ASKED)
        return asked.at_once()

    # Ranks inherit it: a signal would kill one that still loads Python, with a traceback. Nor does this process miss
    # any.
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    command = [sys.executable, "-m", "zerolora.train", *arguments]
    ranks = Ranks(where, command, environment_of(device), log_of)
    try:
        asked.listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    except BaseException:
        ranks.end()
        raise
    codes = wait_for(ranks, over)
    check(codes, log_of)
    if asked.first and any(code is None for code in codes.values()):
        raise UserError(f"training was ended by {asked.first.name}; run the same command to resume from its checkpoint")
    if STOPPED in codes.values():
        raise Stopped("training stopped on request; run the same command to resume")


class Asked:
    """The stop signals of this process: to stop after the step, or at once."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.deadline = math.inf
        self._interrupted = math.inf

    def listen(self) -> None:
        for number in ASKING:
            signal.signal(number, self._take)

    def at_once(self) -> bool:
        """Return whether the deadline has passed."""
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
    """Return the environment of ranks on `device` (cpu or cuda): variables that must be set before libraries load."""
    # More threads than cores slow each rank down. With one on CPU, sums are also taken in the same order on every
    # machine, so adapters are byte-identical.
    # Threads that OpenBLAS starts when numpy loads would prevent forks (fork.py).
    # DeepSpeed and bitsandbytes look for a GPU when they are imported, also if none is visible. torch would then call
    # CUDA, after which no process that uses it can be forked.
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    environment = {"OMP_NUM_THREADS": "1"} | inherited | dict.fromkeys(OPENBLAS, "1")
    environment |= {"DS_ACCELERATOR": device, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if device == "cpu":
        return CPU_MALLOC | environment | {VISIBLE: ""}
    if not any(name in environment for name in ALLOCATOR) and _gpus_map_memory():
        environment[ALLOCATOR[0]] = GROWING_SEGMENTS
    return environment


def _gpus_map_memory() -> bool:
    """Return whether all visible GPUs support growing segments; without a driver there are none."""
    library = devices.driver_library()
    gpus = devices.visible(library) if library is not None else []
    return isinstance(gpus, list) and all(gpu.maps_memory for gpu in gpus)


class Fork:
    """A rank that another process forked, as a child of this one; like subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> None:
        self._wait(0)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class Ranks:
    """The processes of this process's ranks, from their start on."""

    def __init__(self, where: Topology, command: list[str], environment: Mapping[str, str], logs: Logs) -> None:
        self._where, self._logs = where, logs
        self._processes: dict[int, subprocess.Popen[bytes] | Fork] = {}
        self._parent: subprocess.Popen[bytes] | None = None
        if len(where.ranks) > 1 and sys.platform == "linux":
            self._fork(command, environment)
            return
        try:
            for rank in where.ranks:
                with _output(logs(rank)) as output:
                    self._processes[rank] = where.start(rank, command, environment, output)
        except OSError:
            self.end()
            raise

    def codes(self) -> Codes:
        """Return the exit codes of the ranks. Those that are not forked yet count as running."""
        if self._parent:
            code = self._parent.poll()
            if code is None:
                return dict.fromkeys(self._where.ranks)
            if code:
                return dict.fromkeys(self._where.ranks) | {self._where.ranks[0]: code}
            self._take_over()
        return {rank: process.poll() for rank, process in self._processes.items()}

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the running ranks; those that are not forked yet get none."""
        for process in self._processes.values():
            process.send_signal(number)

    def end(self) -> None:
        """Kill all ranks: with one of them gone, the others wait in a collective and could not save."""
        if self._parent:
            self._parent.kill()
            self._parent.wait()
            self._take_over()
        self.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def _fork(self, command: list[str], environment: Mapping[str, str]) -> None:
        first, listener = self._where.ranks[0], self._where.listener
        (self._pids, pids), (start, self._start) = os.pipe(), os.pipe()
        request = Request(
            environments={str(rank): self._where.environment(rank) for rank in self._where.ranks},
            logs={str(rank): str(log) for rank in self._where.ranks if rank != first and (log := self._logs(rank))},
            pids=pids,
            start=start,
            listener=listener.fileno() if listener else None,
        )
        kept = [pids, start, *([listener.fileno()] if listener else [])]
        _reap_orphans(True)
        try:
            with _output(self._logs(first)) as output:
                self._parent = subprocess.Popen(
                    command, env={**environment, REQUEST: request.text()}, stdout=output, stderr=output, pass_fds=kept
                )
        finally:
            os.close(pids)
            os.close(start)

    def _take_over(self) -> None:
        """Register the ranks that the parent has forked, now that it has ended, and let them start."""
        whole, self._parent = self._parent and self._parent.returncode == 0, None
        with os.fdopen(self._pids, encoding="ascii") as lines:
            forked = [Fork(int(line)) for line in lines]
        self._processes.update(zip(self._where.ranks, forked, strict=False))
        if whole:
            with contextlib.suppress(BrokenPipeError):  # all have failed already
                os.write(self._start, b"x" * len(forked))
        os.close(self._start)  # a rank that has read no byte by now ends
        _reap_orphans(False)


def wait_for(ranks: Ranks, over: Callable[[Ranks], bool]) -> Codes:
    """Wait until all ranks have ended, one has failed, or `over` returns True; it is called several times a second.

    Returns the exit code of each rank; None for those that were still running, which are killed.
    """
    codes: Codes = {}
    try:
        while None in (codes := ranks.codes()).values() and not failed(codes) and not over(ranks):
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + CAUSE_SECONDS
        while failed(codes) and None in codes.values() and not _explained(codes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            codes = ranks.codes()
    finally:
        ranks.end()
    return codes


def failed(codes: Codes) -> list[int]:
    """Return the ranks that neither finished nor stopped, the likeliest cause first: a user's mistake, then a signal; a
    rank that lost its peer fails with other exit codes."""
    ranks = [rank for rank, code in codes.items() if code not in (None, 0, STOPPED)]
    return sorted(ranks, key=lambda rank: (codes[rank] != MISTAKE, (codes[rank] or 0) > 0))


def check(codes: Codes, logs: Logs, what: str = "rank") -> None:
    """Raise UserError for the rank that failed first, if one did: with its user error, else with its last lines."""
    for rank in failed(codes)[:1]:
        code, log = codes[rank] or 0, logs(rank)
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log and log.is_file() else []
        mistake = list(itertools.takewhile(lambda line: line.startswith(PREFIX), reversed(lines)))
        if code == MISTAKE and mistake:
            raise UserError("\n".join(line.removeprefix(PREFIX) for line in reversed(mistake)))
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        first = f"{what} {rank} failed with {reason}{memory}{'; its last lines:' if lines else ''}"
        raise UserError("\n".join([first, *lines]))


def _explained(codes: Codes) -> bool:
    """Return whether a rank failed in a way that peers cannot cause."""
    return any((codes[rank] or 0) < 0 or codes[rank] == MISTAKE for rank in failed(codes))


@contextlib.contextmanager
def _output(log: Path | None) -> Iterator[IO[bytes] | None]:
    if log is None:
        yield None
    else:
        with log.open("wb") as file:
            yield file


def _reap_orphans(wanted: bool) -> None:
    """Adopt processes whose parent has ended, or stop doing so."""
    ctypes.CDLL(None).prctl(SUBREAPER, int(wanted), 0, 0, 0)
