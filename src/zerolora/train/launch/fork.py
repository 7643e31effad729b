"""The ranks of a node as forks of one process that has loaded their libraries; `become_rank` returns in each of them.

Importing torch, transformers, peft and DeepSpeed takes several CPU-seconds and thousands of files. So launcher.py
starts one process for each node, which imports them once, forks a process for each rank and exits; the ranks become
children of the launcher, and share the pages of the imported libraries.

A fork has neither the threads nor the CUDA context of its parent. Imports should start neither; if one does, the forked
process executes its program again, as an independent process.
"""

import ctypes
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

REQUEST = "ZEROLORA_FORK"
"""The forks to make, as JSON of Request; unset for a process that is a rank itself."""
FORKABLE_THREADS = {"jemalloc_bg_thd"}
"""Threads that their library restarts in a forked process: jemalloc's, which pyarrow links."""
PREFIX = "zerolora: "  # as in log.py, which this module does not load, so that other programs can use it alone
NAME = 15  # PR_SET_NAME (man 2 prctl)


@dataclass(frozen=True)
class Request:
    """The launcher's request for forks."""

    environments: dict[str, dict[str, str]]
    """Variables of each rank."""
    logs: dict[str, str]
    """Output file of each rank that does not share this process's output."""
    pids: int
    """Descriptor for the process ids of the ranks, a line each, in the order of ranks."""
    start: int
    """Descriptor from which a rank reads one byte before it continues; at its end the rank exits."""
    listener: int | None
    """The listening socket, for rank 0."""

    def text(self) -> str:
        return json.dumps(asdict(self))


def become_rank() -> None:
    """Return in the process of a rank: in this one, or, on the launcher's request, in each of its forks.

    Call it after all imports, and before anything is computed. ps and top show the process as zl-rank3, say.
    """
    text = os.environ.pop(REQUEST, None)
    if text is not None:
        _fork(Request(**json.loads(text)))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(NAME, f"zl-rank{int(os.environ['RANK'])}".encode(), 0, 0, 0)


def _fork(request: Request) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    hindrance = _hindrance()
    if hindrance:
        _report_slower(f"a fork would lack {hindrance}")
    for rank in request.environments:
        pid = os.fork()
        if not pid:
            _start(request, rank, forkable=not hindrance)
            return
        os.write(request.pids, f"{pid}\n".encode())
    os._exit(0)


def _start(request: Request, rank: str, *, forkable: bool) -> None:
    """Set up a forked process as a rank, once this node's launcher has become its parent."""
    os.close(request.pids)
    os.environ |= request.environments[rank]
    if rank in request.logs:
        with Path(request.logs[rank]).open("wb") as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
    if request.listener is not None and rank != "0":
        os.close(request.listener)
    if not os.read(request.start, 1):
        os._exit(1)
    os.close(request.start)
    called = forkable and _cuda_was_called()
    if called and rank == next(iter(request.environments)):
        _report_slower("a library has called CUDA before the fork")
    if called or not forkable:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (this same command)
    # Copies would draw the same random numbers.
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _report_slower(reason: str) -> None:
    line = f"each rank loads its libraries itself, which takes longer: {reason}"
    print(f"{PREFIX}{line}", file=sys.stderr, flush=True)


def _hindrance() -> str | None:
    """Return the part of this process that its forks would lack, if any: other threads, or a CUDA context."""
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())]
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return "the CUDA context that a library has made"
    others = sorted(set(names) - FORKABLE_THREADS)
    return f"threads that a library has started ({', '.join(others)})" if others else None


def _cuda_was_called() -> bool:
    """Return whether this fork's parent called CUDA, so that calls fail here; on a CPU that is harmless.

    With a CUDA build of torch, libraries look for a GPU while they load, also where there is none.
    """
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda._is_in_bad_fork()) and os.environ.get("DS_ACCELERATOR") != "cpu"
