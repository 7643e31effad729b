"""End a command when the workflow engine that started it, or the shell of its job, has ended.

A killed engine leaves the shells of its jobs and their commands running, with no engine to record their outputs: the
kernel notifies only children, and only on request (PR_SET_PDEATHSIG). So each engine puts itself and each job's shell
into the environment, and a command watches both. A command that a user started, or whose environment comes from another
machine or container, watches nothing.
"""

import contextlib
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
"""The engine of a job: machine and process namespace, process id, start time."""
SHELL = "ZEROLORA_JOB_SHELL"
"""The process id of a job's shell, set by the shell itself."""
DVC = "ZEROLORA_DVC"
"""The processes from an engine's parent up to the DVC around it, each with its start time, from workflow/scripts/rule;
with 0 if that DVC had ended."""
PDEATHSIG = 1  # PR_SET_PDEATHSIG (man 2 prctl)
GRACE_SECONDS = 30
"""From SIGTERM to SIGKILL, for commands that save their state first (train/launch/launcher.py)."""


def name_engine() -> None:
    """Put this process, a workflow engine, into the environment of its jobs."""
    os.environ[ENGINE] = f"{_here()} {os.getpid()} {_started(os.getpid())}"
    os.environ.pop(SHELL, None)


def end_with_engine() -> None:
    """End this process once its engine or its job's shell has ended: by SIGTERM, then SIGKILL with all descendants."""
    here, _, engine = os.environ.get(ENGINE, "").partition(" ")
    if not engine or here != _here():
        return
    pid, _, started = engine.partition(" ")
    watched = [(int(pid), started)]
    if SHELL in os.environ:
        watched.append((int(os.environ[SHELL]), ""))
    end_with(watched)


def end_with_parent() -> None:
    """Kill this process, an engine inside DVC, once that DVC or a shell between has ended."""
    watched = [each.partition(":") for each in os.environ.get(DVC, "").split()]
    if any(pid == "0" for pid, _, _ in watched):
        _end(at_once=True)
    end_with([(int(pid), started) for pid, _, started in watched], at_once=True)


def end_at_parents_death(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent has died: for a part of a command, useless alone.

    `parent` is the parent's process id; not needed in a fork by multiprocessing.
    """
    if sys.platform != "linux":
        return
    if parent is None and (forked_by := multiprocessing.parent_process()):
        parent = forked_by.pid
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGKILL)


def end_with(watched: list[tuple[int, str]], at_once: bool = False) -> None:
    """End this process once one of `watched` has ended, (process id, start time or "") each; `at_once`: by SIGKILL."""
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
    """Return the descendants of a process, the nearest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    result, waiting = [], [pid]
    while waiting:
        nearest = children.get(waiting.pop(0), [])
        result += nearest
        waiting += nearest
    return result


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
    """Kill this process and all its descendants."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _here() -> str:
    """Return the scope of process ids: this machine, its boot and this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = namespace = ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _started(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty if it has ended."""
    fields = _fields(pid)
    return fields[19] if fields else ""


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may contain blanks (man 5 proc)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
