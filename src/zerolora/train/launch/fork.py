"""Ranks of a node as forks of one process that has loaded their libraries: `become_rank` returns in each of them.

Importing torch, transformers, peft and DeepSpeed takes several CPU-seconds and thousands of files. The launcher
(processes.py) therefore starts one process a node, which imports them once, forks a process a rank and exits; the ranks
become children of the launcher, and share the pages of what was imported.

A fork keeps neither threads nor a CUDA context of its parent. Nothing that is imported computes anything, so there is
neither; where there is all the same, the forked process starts its program again, and is as any process.
"""

import ctypes
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from zerolora.errors import wording

REQUEST = "ZEROLORA_FORK"
"""What to fork, as JSON of Request; not set in the environment of a process that is a rank itself."""
FORKABLE_THREADS = {"jemalloc_bg_thd"}
"""Threads that their library starts again in a forked process: jemalloc's, which pyarrow links."""
PREFIX = "zerolora: "  # of log.py, which is not loaded before a program that may use this module alone
NAME = 15  # PR_SET_NAME (man 2 prctl)


@dataclass(frozen=True)
class Request:
    """What the launcher asks for."""

    environments: dict[str, dict[str, str]]
    """Variables of each rank."""
    logs: dict[str, str]
    """File of the output of each rank that has not this process's own."""
    pids: int
    """Descriptor to which the process id of each rank is written, a line each, in the order of ranks."""
    start: int
    """Descriptor from which a rank reads one byte before it continues; it ends if there is none."""
    listener: int | None
    """The listening socket, of rank 0."""

    def text(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))


def become_rank() -> None:
    """Return in the process of a rank: in this one, or, if the launcher asked for forks, in each of them.

    Call it after all imports, and before anything is computed.
    """
    text = os.environ.pop(REQUEST, None)
    if text is not None:
        _fork(Request(**json.loads(text)))
    name_process(int(os.environ["RANK"]))


def name_process(rank: int) -> None:
    """Name this process after its rank, as ps and top show it: zl-rank3."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(NAME, f"zl-rank{rank}".encode(), 0, 0, 0)


def _fork(request: Request) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    hindrance = _hindrance()
    if hindrance:
        _say_slower(wording(f"a fork would lack {hindrance}"))
    for rank in request.environments:
        pid = os.fork()
        if not pid:
            _start(request, rank, forkable=not hindrance)
            return
        os.write(request.pids, f"{pid}\n".encode())
    os._exit(0)


def _start(request: Request, rank: str, *, forkable: bool) -> None:
    """Make a forked process one rank, once this node's launcher has become its parent."""
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
        _say_slower(wording("a library has called CUDA before the fork"))
    if called or not forkable:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (this same command)
    _draw_anew()


def _say_slower(why: str) -> None:
    said = wording(f"each rank loads its libraries itself, which takes longer: {why}")
    print(f"{PREFIX}{said}", file=sys.stderr, flush=True)


def _hindrance() -> str | None:
    """Return what forks of this process would lack: its other threads, or its CUDA context; None if nothing."""
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())]
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return wording("the CUDA context that a library has made")
    others = sorted(set(names) - FORKABLE_THREADS)
    return wording(f"threads that a library has started ({', '.join(others)})") if others else None


def _cuda_was_called() -> bool:
    """Tell whether the process that this one is a fork of called CUDA, which fails here then: no harm on a CPU.

    Libraries look for a GPU while they load, also where there is none and torch is its CUDA build.
    """
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda._is_in_bad_fork()) and os.environ.get("DS_ACCELERATOR") != "cpu"


def _draw_anew() -> None:
    """Seed the global random generators, so that ranks do not draw the same numbers by being copies."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
