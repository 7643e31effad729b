"""A command that a workflow engine started ends when the engine, or the shell of its job, has ended.

The kernel tells nobody but a child, and only if it wants (PR_SET_PDEATHSIG), that a process was killed: the shell of a
job, and what it started, would go on without an engine that records what they write. So each engine names itself and
each job's shell in the environment, and a command watches both. One that is started by hand, or that reaches another
machine or container by its environment, watches nobody.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

ENGINE = "ZEROLORA_ENGINE"
"""The engine of a job: machine and process namespace, process id, time of its start."""
SHELL = "ZEROLORA_JOB_SHELL"
"""The process id of the shell of a job, which the shell itself sets."""
DVC = "ZEROLORA_DVC"
"""The processes from the parent of an engine up to the DVC that it runs inside, each with the time of its start, as
workflow/scripts/rule has them; with 0 if that DVC had ended."""
PDEATHSIG = 1  # PR_SET_PDEATHSIG (man 2 prctl)
GRACE_SECONDS = 30
"""From SIGTERM to SIGKILL, for what saves its state first (train/launch/launcher.py)."""


def name_engine() -> None:
    """Let the jobs of this process, a workflow engine, know it."""
    os.environ[ENGINE] = f"{_here()} {os.getpid()} {_started(os.getpid())}"
    os.environ.pop(SHELL, None)


def end_with_engine() -> None:
    """End this process once the engine that started it, or the shell of its job, has ended: by SIGTERM, and by SIGKILL
    with all that it has started if it takes longer than GRACE_SECONDS."""
    here, _, engine = os.environ.get(ENGINE, "").partition(" ")
    if not engine or here != _here():
        return
    pid, _, started = engine.partition(" ")
    watched = [(int(pid), started)]
    if SHELL in os.environ:
        watched.append((int(os.environ[SHELL]), ""))
    end_with(watched)


def end_with_parent() -> None:
    """The same of the DVC that started this process, and of the shells between, by SIGKILL: for an engine inside it."""
    watched = [each.partition(":") for each in os.environ.get(DVC, "").split()]
    if any(pid == "0" for pid, _, _ in watched):
        _end(at_once=True)
    end_with([(int(pid), started) for pid, _, started in watched], at_once=True)


def end_at_parents_death(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent has died: for a part of a command, which has no use alone.

    `parent` is the parent's process id, which a fork by multiprocessing knows itself.
    """
    if sys.platform != "linux":
        return
    if parent is None and (forked_by := multiprocessing.parent_process()):
        parent = forked_by.pid
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGKILL)


def end_with(watched: list[tuple[int, str]], at_once: bool = False) -> None:
    """End this process once one of these has ended, each a process id and the time of its start, if that is known.

    `at_once`: by SIGKILL, instead of SIGTERM.
    """
    if sys.platform != "linux":
        return
    files = []
    for pid, started in watched:
        try:
            files.append(os.pidfd_open(pid))
        except ProcessLookupError:
            _end(at_once)
            return
        except OSError:  # a kernel before 5.3, or a container that forbids it
            continue
        # Opened first, so that the process compared here is the one that is watched.
        if started and _started(pid) != started:
            _end(at_once)
            return
    if files:
        threading.Thread(target=_watch, args=(files, at_once), daemon=True, name="parents").start()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and what those have started, the nearest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        nearest = children.get(waiting.pop(0), [])
        found += nearest
        waiting += nearest
    return found


def _watch(files: list[int], at_once: bool) -> None:
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    while not poll.poll():
        pass
    _end(at_once)


def _end(at_once: bool) -> None:
    if at_once:
        os.kill(os.getpid(), signal.SIGKILL)
    handled: Any = signal.getsignal(signal.SIGTERM)
    if handled in (signal.SIG_DFL, signal.SIG_IGN, None):
        _kill_all()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    _kill_all()


def _kill_all() -> None:
    """End this process and all that it has started, at once."""
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)


def _here() -> str:
    """Return what a process id means something in: this machine, since its start, and this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = namespace = ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _started(pid: int) -> str:
    """Return when a process started, in ticks since the machine's start; empty if it is not there any more."""
    fields = _fields(pid)
    return fields[19] if fields else ""


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, which may hold blanks (man 5 proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
