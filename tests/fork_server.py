"""The project's commands as forks of one process that has imported their libraries.

Most of what a test's command costs is the import of torch, DeepSpeed, transformers, Snakemake and DVC: up to ten
CPU-seconds for one that then computes for a tenth of a second. Here that is paid once. What runs is the project's own
code in processes of its own, with the arguments, environment, directory and files of the request; the ranks of a
training are forked from its launcher's fork. Tests of start-up, of memory, of terminals and of Slurm, which also sends
signals, start the real commands.

The libraries are imported by one process for all workers (loaded_process.py). It forks a server for each state of the
code, since tests change that, and a server forks a process for each command (forked.py).

A directory of stand-ins for `zerolora`, `snakemake`, `dvc` and `python`, put first on PATH, has the commands that those
start in turn come here too; `python` comes here for these commands, for a text (-c) and for a benchmark.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

COMMANDS = ("zerolora", "snakemake", "dvc")
ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SOURCE = ROOT / "src/zerolora"
KEPT_FILES = ("__pycache__/fingerprints.json", "report/__pycache__/vega-*.js")
"""What the commands keep of their own code: its parsed modules, and the script of its pages."""
CODE = ("src", "workflow")
"""The commands' own code, and the rules that its fingerprints cover."""
LOCK = "envs/requirements.lock"
"""An input of `report`, which it reads beside the rules."""
IMPORTED_WITH = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Variables that the libraries read while they are imported, as the commands set them."""
WITHOUT = "FORK_SERVER_WITHOUT"
"""The variable with packages, separated by commas, that a process and those that it starts cannot import."""
KEPT = 2
"""Servers that stay up: that of the shipped code, and that of code which a test has changed."""
FEWER_COLLECTIONS = (50_000, 20, 20)
"""gc's thresholds in the processes of tests, which live for seconds: usual ones cost a twentieth of their time."""
# The stand-in of a command, which starts for each stage: with the modules inside the interpreter alone, since importing
# json, signal and socket takes longer than all else.
STAND_IN = """#!{python} -IS
import _json, _signal, _socket, posix, sys
name, arguments = sys.argv[0].rpartition("/")[2], sys.argv[1:]
if name == "python":
    if arguments[:1] == ["-m"] and arguments[1] in {commands}:
        name, *arguments = arguments[1:]
    elif arguments[:1] != ["-c"] and not "".join(arguments[:1]).startswith({benchmarks!r}):
        posix.execv({interpreter!r}, [{interpreter!r}, *arguments])
signals = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGUSR1)
_signal.pthread_sigmask(_signal.SIG_BLOCK, signals)  # until there is a process that they are for
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
text = _json.encode_basestring_ascii
def whole(pairs):
    return "{{" + ", ".join(f"{{text(key)}}: {{value}}" for key, value in pairs.items()) + "}}"
variables = {{key.decode("utf-8", "surrogateescape"): text(value.decode("utf-8", "surrogateescape"))
             for key, value in posix.environ.items()}}
command = "[" + ", ".join(map(text, [name, *arguments])) + "]"
request = whole(dict(command=command, directory=text(posix.getcwd()), environment=whole(variables), before='""'))
message = request.encode() + b"\\n"
files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
sent = server.sendmsg([message], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
server.sendall(message[sent:])
received = b""
def line():
    global received
    while b"\\n" not in received:
        received += server.recv(4096) or b"1\\n"
    first, _, received = received.partition(b"\\n")
    return int(first)
pid = line()
for number in signals:
    _signal.signal(number, lambda number, _: posix.kill(pid, number))
_signal.pthread_sigmask(_signal.SIG_UNBLOCK, signals)
code = line()
sys.exit(code if code >= 0 else 128 - code)
"""


def copy_kept(root: Path) -> None:
    """Copy the files that this tree's commands have cached to another tree."""
    for pattern in KEPT_FILES:
        for path in SOURCE.glob(pattern):
            (copy := root / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy2(path, copy)


State = tuple[str, int, int, int]
"""Path, inode, size and time of a file."""


class Libraries:
    """The process that has imported the libraries and forks servers (loaded_process.py): one for all workers."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Connect to it, and start it if nobody has. It ends when nobody is connected any more."""
        session = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"of{os.getpid()}")
        folder = Path(tempfile.gettempdir()) / f"zl-{session[:16]}"
        folder.mkdir(mode=0o700, exist_ok=True)
        address = folder / "socket"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not address.exists():
                # Of no project's code, which each server has of its own.
                variables = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
                process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("loaded_process.py")), str(address), lock.name],
                    env={**variables, **IMPORTED_WITH},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                )
                assert process.stdout and process.stdout.readline() == b"ready\n"
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(str(address))
        self._lines = self._connection.makefile()

    def fork(self, source: Path, address: str, stand_ins: Path) -> int:
        """Start a server of the code in `source`, and return its process id."""
        request = {"source": str(source), "address": address, "stand_ins": str(stand_ins)}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        pid = int(self._lines.readline())
        assert pid, f"{source} cannot be imported; standard error says why"
        return pid

    def stop(self) -> None:
        """Take leave of the process."""
        self._lines.close()
        self._connection.close()


class ForkServer:
    """A server of commands with the code of one source tree, and the stand-ins that call it."""

    def __init__(self, libraries: Libraries, root: Path) -> None:
        """Start a server of a copy of `root`'s code, which may change."""
        self._home = tempfile.TemporaryDirectory(prefix="zl")  # a socket's path has at most 107 characters
        folder = Path(self._home.name)
        self.stand_ins = folder / "bin"
        self.stand_ins.mkdir(parents=True)
        for name in CODE:
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / LOCK).parent.mkdir()
        shutil.copy2(root / LOCK, folder / LOCK)
        copy_kept(folder)
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
        self._pid = libraries.fork(folder / "src", self._address, self.stand_ins)

    def start(
        self,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        before: str = "",
        given: bytes = b"",
    ) -> "Started":
        """Start one of the commands, `python -c TEXT` or `python SCRIPT`, after the Python statements `before` in its
        process; `given` is its standard input."""
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._address)
        request = {
            "command": [Path(command[0]).name, *command[1:]],
            "directory": str(directory),
            "environment": dict(environment),
            "before": before,
        }
        files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (read until the test ends)
        with tempfile.TemporaryFile() as typed:
            typed.write(given)
            typed.seek(0)
            descriptors = [file.fileno() for file in (typed, *files)]
            socket.send_fds(server, [json.dumps(request).encode() + b"\n"], descriptors)
        return Started(server, *files)

    def run(
        self,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        before: str = "",
        given: bytes = b"",
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the commands and return how it ended and what it wrote."""
        started = self.start(command, directory, environment, before, given)
        code = started.wait()
        return subprocess.CompletedProcess(list(command), code, started.output(), started.errors())

    def stop(self) -> None:
        """End the server; what it has forked continues."""
        os.kill(self._pid, signal.SIGKILL)
        self._home.cleanup()


class ForkServers:
    """The servers of a test session: one for each state of the code that is in use."""

    def __init__(self) -> None:
        self._libraries: Libraries | None = None
        self._servers: dict[str, ForkServer] = {}
        self._keys: dict[Path, tuple[list[State], str]] = {}

    def of(self, root: Path, environment: Mapping[str, str]) -> ForkServer:
        """Return a server with the code that is in a tree now."""
        key = self._key(root)
        server = self._servers.pop(key, None)
        if self._libraries is None:
            self._libraries = Libraries(environment)
        if server is None:
            server = ForkServer(self._libraries, root)
        self._servers[key] = server
        while len(self._servers) > KEPT:
            self._servers.pop(next(iter(self._servers))).stop()
        return self._servers[key]

    def _key(self, root: Path) -> str:
        """Return the digest of the code in a tree. Files are read again only if one has changed."""
        states = sorted(state for folder in CODE for state in _states(root / folder))
        before, key = self._keys.get(root, ([], ""))
        if states != before:
            digest = hashlib.sha256()
            for path in (Path(name) for name, *_ in states):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
            key = digest.hexdigest()
            self._keys[root] = states, key
        return key

    def stop(self) -> None:
        """End all servers."""
        while self._servers:
            self._servers.popitem()[1].stop()
        if self._libraries:
            self._libraries.stop()
            self._libraries = None


def _states(folder: Path | str) -> Iterator[State]:
    """Yield the files of a tree, but for compiled ones."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _states(entry.path) if entry.name != "__pycache__" else ()
            else:
                state = entry.stat()
                yield entry.path, state.st_ino, state.st_size, state.st_mtime_ns


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

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, and wait until it has."""
        self.signal(signal.SIGKILL)
        self.wait()

    def output(self) -> str:
        """Return what it has written to its standard output."""
        return self._read(self._output)

    def errors(self) -> str:
        """Return what it has written to its standard error."""
        return self._read(self._errors)

    def _read(self, file: IO[bytes]) -> str:
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()
