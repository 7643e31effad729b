"""The processes of the ranks of this node: started, watched until they end, and ended.

Several ranks are forks of one process that loads their libraries once (fork.py); they become children of this process,
which is made the reaper of that process's orphans meanwhile. A single rank is a process of its own, as are ranks where
Linux's prctl is missing.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from zerolora.errors import UserError, wording
from zerolora.log import PREFIX
from zerolora.train.launch.fork import REQUEST, Request
from zerolora.train.launch.stop_signals import STOPPED
from zerolora.train.launch.topology import Topology

POLL_SECONDS = 0.1
CAUSE_SECONDS = 2.0
"""How long a failed rank's peers may take to end: the kernel closes a killed process's connections, on which its peers
fail, before it reports the process."""
TAIL_LINES = 20
MISTAKE = 2
"""Exit code of a rank that ended with UserError."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER (man 2 prctl)
Codes = dict[int, int | None]
"""Exit code by rank; minus the number of the signal that ended it; None of one that runs."""
Logs = Callable[[int], Path | None]
"""The file of a rank's output; None for this process's own output."""


class Process(Protocol):
    """What subprocess.Popen has in common with a fork."""

    def poll(self) -> int | None:
        """Return the exit code, if the process has ended."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process has not ended."""


class Fork:
    """A child of this process by its id: a rank that another process forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, if the process has ended."""
        return self._wait(os.WNOHANG)

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._wait(0)

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class Ranks:
    """The processes of the ranks that this process answers for, from their start on."""

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
        """Return which ranks have ended, and how. Those that are not forked yet count as running."""
        if self._parent:
            code = self._parent.poll()
            if code is None:
                return dict.fromkeys(self._where.ranks)
            if code:
                return dict.fromkeys(self._where.ranks) | {self._where.ranks[0]: code}
            self._take_over()
        return {rank: process.poll() for rank, process in self._processes.items()}

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the ranks that run; one that is not forked yet gets none."""
        for process in self._processes.values():
            process.send_signal(number)

    def end(self) -> None:
        """End all ranks at once: with one of them gone, the others wait in a collective and could not save."""
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
        logs = {str(rank): str(log) for rank in self._where.ranks if rank != first and (log := self._logs(rank))}
        request = Request(
            environments={str(rank): self._where.environment(rank) for rank in self._where.ranks},
            logs=logs,
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
        """Note the ranks that the parent has forked, now that it has ended, and let them begin."""
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
    """Wait until all ranks have ended, one has failed, or `over` returns True; it is asked several times a second.

    Returns how each rank had ended by itself; those that still ran are ended (None).
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
    """Return the ranks that ended otherwise than by having finished or stopped, the likeliest cause first.

    A rank whose peer has gone fails with an exit code of its own, so a user's mistake and a signal go before it.
    """
    ranks = [rank for rank, code in codes.items() if code not in (None, 0, STOPPED)]
    return sorted(ranks, key=lambda rank: (codes[rank] != MISTAKE, (codes[rank] or 0) > 0))


def check(codes: Codes, logs: Logs, what: str = "rank") -> None:
    """Raise UserError for the rank that failed first, if one did: with the user's mistake that it named, else with its
    last lines."""
    for rank in failed(codes)[:1]:
        code, log = codes[rank] or 0, logs(rank)
        reason = wording(f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log and log.is_file() else []
        mistake = list(itertools.takewhile(lambda line: line.startswith(PREFIX), reversed(lines)))
        if code == MISTAKE and mistake:
            raise UserError("\n".join(line.removeprefix(PREFIX) for line in reversed(mistake)))
        first = wording(f"{what} {rank} failed with {reason}{'; its last lines:' if lines else ''}")
        raise UserError("\n".join([first, *lines]))


def _explained(codes: Codes) -> bool:
    """Return whether a rank ended in a way that its peers do not cause."""
    return any((codes[rank] or 0) < 0 or codes[rank] == MISTAKE for rank in failed(codes))


@contextlib.contextmanager
def _output(log: Path | None) -> Iterator[IO[bytes] | None]:
    if log is None:
        yield None
    else:
        with log.open("wb") as file:
            yield file


def _reap_orphans(wanted: bool) -> None:
    """Have processes whose parent ends become children of this one, or no longer."""
    ctypes.CDLL(None).prctl(SUBREAPER, int(wanted), 0, 0, 0)
