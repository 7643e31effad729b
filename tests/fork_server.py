"""The project's commands as forks of one process that has imported their libraries.

    python fork_server.py SOCKET STAND_INS

Most of what a test's command costs is the import of torch, DeepSpeed, transformers, Snakemake and DVC: up to ten
CPU-seconds for one that then computes for a tenth of a second. Here that is paid once. What runs is the project's own
code in processes of its own, with the arguments, environment, directory and files of the request; the ranks of a
training are forked from its launcher's fork. Tests of signals, of start-up, of a process's memory, of terminals and of
Slurm start the real commands.

A directory of stand-ins for `zerolora`, `snakemake`, `dvc` and `python`, put first on PATH, has the commands that those
start in turn come here too; `python` comes here for these commands, for a text (-c) and for a benchmark.
"""

import atexit
import contextlib
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import psutil

from zerolora.train.launch.processes import Fork

COMMANDS = ("zerolora", "snakemake", "dvc")
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CODE = ("src", "workflow")
"""The commands' own code, and the rules that its fingerprints cover."""
IMPORTED_WITH = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}
"""Variables that the libraries read while they are imported, as the commands set them."""
WITHOUT = "FORK_SERVER_WITHOUT"
"""The variable with packages, separated by commas, that a process and those that it starts cannot import."""
KEPT = 2
"""Servers that stay up: that of the shipped code, and that of code which a test has changed."""
IMPORTED = (
    *(
        "dvc.cli.parser",
        "dvc.repo.reproduce",
        "dvc.repo.stage",
        "dvc.stage.cache",
        "dvc.dvcfile",
        "dvc.utils.strictyaml",
    ),
    *("dvc.cachemgr", "dvc.data_cloud", "dvc.rwlock", "dvc_data.hashfile.status", "networkx", "scmrepo.git"),
    *(f"dvc.repo.{name}" for name in ("artifacts", "datasets", "index", "metrics", "params", "plots")),
    *("smart_open", "snakemake.cli", "snakemake.report.html_reporter"),
    *("datasets", "jinja2", "matplotlib.backends.backend_svg", "matplotlib.pyplot"),
    *("transformers.conversion_mapping", "transformers.models.llama.modeling_llama"),
    *(f"zerolora.{name}" for name in ("cli", "config.resolve", "data.pack", "data.prepare", "evaluate.evaluate")),
    *(f"zerolora.{name}" for name in ("fetch.models", "fingerprint", "memory.estimate", "memory.table", "merge.merge")),
    *(f"zerolora.{name}" for name in ("planner.render", "probe.rank", "report.report", "report.show")),
    "zerolora.train.__main__",
    *(f"zerolora.train.{name}" for name in ("engines.ddp", "engines.deepspeed", "engines.fsdp", "rank")),
)
RANKS = {"zerolora.train": "zerolora.train.__main__", "zerolora.probe.rank": "zerolora.probe.rank"}
"""What is started as ranks, and the module of its `main`."""
LARGEST = 1 << 20
"""Bytes of a request."""

# The stand-in of a command: no import but what it needs, since it starts for each stage.
STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
name, *arguments = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
if name == "python":
    if arguments[:1] == ["-m"] and arguments[1] in {commands}:
        name, *arguments = arguments[1:]
    elif arguments[:1] != ["-c"] and not "".join(arguments[:1]).startswith({benchmarks!r}):
        os.execv({interpreter!r}, [{interpreter!r}, *arguments])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = dict(command=[name, *arguments], directory=os.getcwd(), environment=dict(os.environ), before="")
socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
lines = server.makefile()
pid = int(lines.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(lines.readline())
sys.exit(code if code >= 0 else 128 - code)
"""


class ForkServer:
    """A server of commands with the code of one source tree, and the stand-ins that call it."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        """Start a server of a copy of `root`'s code, which may change."""
        self._home = tempfile.TemporaryDirectory(prefix="zl")  # a socket's path has at most 107 characters
        folder = Path(self._home.name)
        self.stand_ins = folder / "bin"
        self.stand_ins.mkdir(parents=True)
        for name in CODE:
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self._address = str(folder / "socket")
        for name in (*COMMANDS, "python"):
            text = STAND_IN.format(
                python=os.path.realpath(sys.executable),
                interpreter=sys.executable,
                commands=COMMANDS,
                benchmarks=str(BENCHMARKS),
                address=self._address,
            )
            (self.stand_ins / name).write_text(text)
            (self.stand_ins / name).chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address, str(self.stand_ins)],
            env={**environment, **IMPORTED_WITH, "PYTHONPATH": str(folder / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout and self._process.stdout.readline() == b"ready\n"
        self.start_seconds = self.cpu_seconds()
        """CPU-seconds of its start."""

    def start(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str], before: str = ""
    ) -> "Started":
        """Start one of the commands, `python -c TEXT` or `python SCRIPT`, after the Python statements `before` in its
        process."""
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._address)
        request = {
            "command": [Path(command[0]).name, *command[1:]],
            "directory": str(directory),
            "environment": dict(environment),
            "before": before,
        }
        files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (read until the test ends)
        with Path(os.devnull).open("rb") as nothing:
            descriptors = [file.fileno() for file in (nothing, *files)]
            socket.send_fds(server, [json.dumps(request).encode() + b"\n"], descriptors)
        return Started(server, *files)

    def run(
        self, command: Sequence[str], directory: Path, environment: Mapping[str, str], before: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the commands and return how it ended and what it wrote."""
        started = self.start(command, directory, environment, before)
        code = started.wait()
        return subprocess.CompletedProcess(list(command), code, started.output(), started.errors())

    def cpu_seconds(self) -> float:
        """Return the CPU-seconds of the server and of the commands that have ended."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)

    def stop(self) -> None:
        """End the server; what it has forked goes on."""
        self._process.kill()
        self._process.communicate()
        self._home.cleanup()


class ForkServers:
    """The servers of a test session: one for each state of the code that is in use."""

    def __init__(self) -> None:
        self._servers: dict[str, ForkServer] = {}
        self._start_seconds = 0.0

    def of(self, root: Path, environment: Mapping[str, str]) -> ForkServer:
        """Return a server with the code that is in a tree now."""
        digest = hashlib.sha256()
        for folder in CODE:
            for path in sorted((root / folder).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
        key = digest.hexdigest()
        server = self._servers.pop(key, None)
        if server is None:
            server = ForkServer(root, environment)
            self._start_seconds += server.start_seconds
        self._servers[key] = server
        while len(self._servers) > KEPT:
            self._servers.pop(next(iter(self._servers))).stop()
        return self._servers[key]

    def cpu_seconds(self) -> float:
        """Return the CPU-seconds that commands took, less those that this process knows as its children's: of servers
        that have ended. Servers' starts count for nothing: whichever test is the first to need one has it."""
        return sum(server.cpu_seconds() for server in self._servers.values()) - self._start_seconds

    def stop(self) -> None:
        """End all servers."""
        while self._servers:
            self._servers.popitem()[1].stop()


SERVERS = ForkServers()
"""The servers of this session."""


class Started:
    """A command under way."""

    def __init__(self, server: socket.socket, output: IO[bytes], errors: IO[bytes]) -> None:
        self._server, self._output, self._errors = server, output, errors
        self._lines = server.makefile()
        self.pid = int(self._lines.readline())

    def wait(self) -> int:
        """Wait until it has ended and return its exit code; minus the number of the signal that ended it."""
        code = int(self._lines.readline())
        self._lines.close()
        self._server.close()
        return code

    def runs(self) -> bool:
        """Return whether it has not ended."""
        return psutil.pid_exists(self.pid)

    def output(self) -> str:
        """Return what it has written to its standard output."""
        return self._read(self._output)

    def errors(self) -> str:
        """Return what it has written to its standard error."""
        return self._read(self._errors)

    def _read(self, file: IO[bytes]) -> str:
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


class LoadedRanks(Fork):
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


def main() -> None:
    """Import everything, and fork a process for each request until standard input ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("zerolora.train.engines.deepspeed").DeepSpeedEngine.load_library()
    importlib.import_module("snakemake.cli").get_argument_parser()  # looks for plugins in all of sys.path, once
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "a fork keeps no other thread"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    clients: dict[int, socket.socket] = {}
    while True:
        waited: list[socket.socket | int] = [listener, read, 0]
        ready, _, _ = select.select(waited, [], [])
        if 0 in ready:
            return
        if read in ready:
            os.read(read, 512)
            _report(clients)
        if listener in ready:
            client, _ = listener.accept()
            text, files, _, _ = socket.recv_fds(client, LARGEST, 3)
            while not text.endswith(b"\n"):
                text += client.recv(LARGEST)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (*clients.values(), client, listener):
                    other.close()
                os.close(read)
                os.close(write)
                _run(json.loads(text), files)
            for file in files:
                os.close(file)
            clients[pid] = client
            client.sendall(f"{pid}\n".encode())


def _report(clients: dict[int, socket.socket]) -> None:
    """Tell clients whose process has ended how it did."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with clients.pop(pid) as client, contextlib.suppress(OSError):
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the process of a request."""
    _forget_finalizers()
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (for as long as the process lives)
    os.chdir(request["directory"])
    _replace_environment(request["environment"])
    # What the commands start in turn is looked for beside the interpreter.
    sys.executable = str(Path(sys.argv[2]) / "python")
    exec(request["before"], {})  # noqa: S102 (a test's own text)
    name, *arguments = sys.argv = request["command"]
    if name in ("zerolora", "python"):
        from zerolora.train.launch import processes, topology

        started = SimpleNamespace(Popen=LoadedRanks)
        processes.subprocess = topology.subprocess = started  # type: ignore[attr-defined, assignment]
    if name != "python":
        _end(_called(importlib.import_module(f"{name}.cli").main))
    if arguments[0] != "-c":
        _end(_called(lambda: _script(arguments)))
    option, text, *rest = arguments
    sys.argv = [option, *rest]
    _end(_called(lambda: exec(text, {"__name__": "__main__"})))  # noqa: S102 (a test's own text)


def _script(command: list[str]) -> None:
    """Be the process of a script with its arguments."""
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
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
    for package in filter(None, environment.get(WITHOUT, "").split(",")):
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]


if __name__ == "__main__":
    main()
