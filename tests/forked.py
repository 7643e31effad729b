"""What a process does that fork_server.py forks: be a command of the project, or a rank.

Imported with the code that the commands are to have (loaded_process.py).
"""

import atexit
import functools
import hashlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import vl_convert
from fork_server import IMPORTED_WITH, WITHOUT
from huggingface_hub import constants
from snakemake import workflow

from zerolora.train.launch import launcher, topology

ENTRIES = {"zerolora": "zerolora.__main__"}
"""Modules whose `main` a command is, of those that are not NAME.cli."""
PLACE = "<the path of the file>"
"""In the place of a file's path."""
RANKS = {"zerolora.train": "zerolora.train.__main__", "zerolora.probe.probe_rank": "zerolora.probe.probe_rank"}
"""What is started as ranks, and the module of its `main`."""


def run(request: dict[str, Any], files: list[int], stand_ins: Path, charts: str) -> NoReturn:
    """Be the process of a request; `stand_ins` is the directory of fork_server.py's stand-ins, `charts` the address of
    the process that draws (loaded_process.py)."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # until an interpreter would have begun
    _forget_finalizers()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for as long as the process lives)
    vl_convert.vegalite_to_svg = functools.partial(_drawn, charts)
    os.chdir(request["directory"])
    _replace_environment(request["environment"])
    # What the commands start in turn is looked for beside the interpreter.
    sys.executable = str(stand_ins / "python")
    exec(request["before"], {})  # noqa: S102 (a test's own text)
    name, *arguments = sys.argv = request["command"]
    signal.signal(signal.SIGINT, handler)
    if name == "snakemake":
        _parse_once(stand_ins)
    if name in ("zerolora", "python"):
        started = SimpleNamespace(Popen=LoadedRanks)
        launcher.subprocess = topology.subprocess = started  # type: ignore[attr-defined, assignment]
    if name != "python":
        _end(_called(importlib.import_module(ENTRIES.get(name, f"{name}.cli")).main))
    if arguments[0] != "-c":
        _end(_called(lambda: _script(arguments)))
    option, text, *rest = arguments
    sys.argv = [option, *rest]
    _end(_called(lambda: exec(text, {"__name__": "__main__"})))  # noqa: S102 (a test's own text)


class LoadedRanks(launcher.Fork):
    """What Popen of `python -m MODULE ARGUMENTS`, or of a benchmark, is for ranks: a fork of a process that has
    imported the module."""

    def __init__(
        self, command: list[str], *, env: Mapping[str, str], stdout: Any, stderr: Any, pass_fds: Sequence[int]
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        super().__init__(os.fork())
        if self.pid:
            return
        _forget_finalizers()
        for file, descriptor in ((stdout, 1), (stderr, 2)):
            if file:
                os.dup2(file.fileno(), descriptor)
        _replace_environment(env)
        if command[1] != "-m":
            _end(_called(lambda: _script(command[1:])))
        sys.argv = command[2:]
        _end(_called(importlib.import_module(RANKS[command[2]]).main))

    @property
    def returncode(self) -> int | None:
        """The exit code, once the process was seen to have ended."""
        return self._code

    def kill(self) -> None:
        """End the process."""
        self.send_signal(signal.SIGKILL)


def _parse_once(folder: Path) -> None:
    """Keep what Snakemake makes of a file of rules, in `folder`: parsing all takes an eighth of a command's time, and
    the projects of tests have the same ones."""
    parse = workflow.parse

    def kept(path: Any, flow: Any, linemap: dict[int, int], shell: Any = None, rulecount: int = 0) -> tuple[str, int]:
        place = path.get_path_or_uri(secret_free=True)
        content = Path(place).read_bytes() + str(rulecount).encode()
        known = folder / f"parsed-{hashlib.sha256(content).hexdigest()}.json"
        if known.is_file():
            code, lines, count = json.loads(known.read_text())
            linemap |= {int(line): original for line, original in lines.items()}
            return code.replace(PLACE, place), count
        code, count = parse(path, flow, linemap=linemap, overwrite_shellcmd=shell, rulecount=rulecount)
        written = folder / f"{os.getpid()}.parsed"
        written.write_text(json.dumps([code.replace(place, PLACE), linemap, count]))
        written.rename(known)
        return code, count

    workflow.parse = kept


def _drawn(charts: str, spec: dict[str, Any], **options: Any) -> str:
    """Return what vl-convert's own function returns, from the process that draws."""
    with socket.socket(socket.AF_UNIX) as artist:
        artist.connect(charts)
        artist.sendall(json.dumps({"vl_spec": spec, **options}).encode() + b"\n")
        with artist.makefile() as lines:
            answer = lines.read()
    if answer[:1] != "1":
        raise ValueError(answer[1:])
    return answer[1:]


def _script(command: list[str]) -> None:
    """Be the process of a script with its arguments."""
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _called(function: Callable[[], Any]) -> int:
    """Call a program's function and return the exit code that it asks for."""
    try:
        result = function()
    except SystemExit as end:
        result = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    if isinstance(result, str):
        print(result, file=sys.stderr)
        return 1
    return int(result or 0)


def _end(code: int) -> NoReturn:
    """End this process as the interpreter does, but for the freeing of what was imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forget_finalizers() -> None:
    """Leave to the process that was forked what it does at its end: its temporary directories, torch's libraries."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()


def _replace_environment(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    if "HF_ENDPOINT" in environment:  # which its client reads while it is imported
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = IMPORTED_WITH["HF_HUB_DISABLE_TELEMETRY"]
        importlib.reload(constants)
    for package in filter(None, environment.get(WITHOUT, "").split(",")):
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]
