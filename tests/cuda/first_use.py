"""Where each stage first uses CUDA: `python first_use.py JSON`, in a process with torch's build for CUDA and no GPU.

A GPU is pretended, as the driver's libraries would name it. Every call of CUDA by torch is real, and recorded until the
first that initialises CUDA; it ends the stage. A call that does not initialise CUDA, and needs it, is a fault: torch
fails in it, or answers with what is not so (pytorch#49952). The stages are forks of one process that has imported all
of zerolora. Prints a line of JSON for each.
"""

import functools
import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from pretended_driver import PretendedDriver

CONSTANT = {"_cuda_getArchFlags", "_cuda_getCompiledVersion", "_cuda_isInBadFork", "_cuda_isHistoryEnabled"}
"""Functions of torch that call nothing of CUDA."""


class Initialised(BaseException):
    """CUDA was to be initialised; no `except Exception` ends it."""


class Trace:
    """The calls of CUDA in this process."""

    def __init__(self) -> None:
        self.bare: list[str] = []
        """Calls before CUDA was initialised."""
        self.initialised: str | None = None
        """Where CUDA was initialised."""
        for name in dir(torch._C):
            function = getattr(torch._C, name)
            if name.startswith("_cuda_") and name not in CONSTANT and isinstance(function, BuiltinFunctionType):
                setattr(torch._C, name, self._recorded(name, function))
        cuda: Any = torch.cuda
        cuda._lazy_init, cuda._device_count_nvml = self._initialise, lambda: 2

    def _initialise(self) -> None:
        if not self.initialised:
            self.initialised = place()
            traceback.print_stack(file=sys.stderr)
        raise Initialised

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            finally:
                if not self.initialised:
                    self.bare.append(f"{name} in {place()}")

        return call


def place() -> str:
    """Return the innermost function of zerolora that is being called."""
    frames = [frame for frame in traceback.extract_stack() if "/src/zerolora/" in frame.filename]
    return f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "outside of zerolora"


def import_all() -> None:
    """Import every module of zerolora."""
    from zerolora.compat.left_out import leave_out

    leave_out("torchao")
    import zerolora

    for module in pkgutil.walk_packages(zerolora.__path__, "zerolora."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def in_fork(function: Callable[[], Any], trace: Trace) -> dict[str, Any]:
    """Return what a function returns in a fork, or how it ended, and the fork's calls of CUDA."""
    read, write = os.pipe()
    if not os.fork():
        try:
            result: Any = function()
        except Initialised:
            result = "initialises CUDA"
        except SystemExit as end:
            result = f"exit {end.code}"
        except BaseException as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps({"result": result, "bare": trace.bare, "initialised": trace.initialised}).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    with os.fdopen(read) as file:
        outcome: dict[str, Any] = json.load(file)
    return outcome


def rank(module: str, arguments: list[str]) -> Callable[[], Any]:
    """Return what the process of a rank does, from its first line."""

    def run() -> Any:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        sys.argv = [module, *arguments]
        return importlib.import_module(module).main()

    return run


def forked_rank(arguments: list[str]) -> Callable[[], Any]:
    """Return what forks of a rank's process would lack, after its imports."""

    def run() -> Any:
        from zerolora.compat import bitsandbytes_patches
        from zerolora.train import rank as module
        from zerolora.train.launch import fork

        sys.argv = ["rank", *arguments]
        module._load(module._arguments())
        bitsandbytes_patches.check_cuda_library()
        from bitsandbytes.cextension import lib

        return {"hindrance": fork._hindrance(), "called": fork._cuda_was_called(), "library": type(lib).__name__}

    return run


def evaluate_rank(arguments: list[str]) -> Callable[[], Any]:
    """Return what the process of a rank of an evaluation does."""

    def run() -> Any:
        from zerolora.evaluate.ranks import run_rank

        with_pretended_driver()
        return run_rank(json.loads(Path(arguments[0]).read_text()) | {"parent": os.getppid()})

    return run


def command(arguments: list[str]) -> Callable[[], Any]:
    """Return what a command of zerolora does."""

    def run() -> Any:
        from zerolora.cli import app

        with_pretended_driver()
        return app(arguments, standalone_mode=False)

    return run


def with_pretended_driver() -> None:
    """Pretend a driver with two GPUs."""
    devices: Any = importlib.import_module("zerolora.machine.devices")
    devices.driver_library = lambda: PretendedDriver(9.0, 9.0)


KINDS: dict[str, Callable[[list[str]], Callable[[], Any]]] = {
    "rank": functools.partial(rank, "zerolora.train.rank"),
    "probe_rank": functools.partial(rank, "zerolora.probe.probe_rank"),
    "forked_rank": forked_rank,
    "evaluate_rank": evaluate_rank,
    "command": command,
}


def main() -> None:
    trace = Trace()
    import_all()
    print(json.dumps(["imports", {"result": None, "bare": trace.bare, "initialised": trace.initialised}]), flush=True)
    for name, kind, arguments in json.loads(sys.argv[1]):
        print(json.dumps([name, in_fork(KINDS[kind](arguments), trace)]), flush=True)


if __name__ == "__main__":
    main()
