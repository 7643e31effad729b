"""The process of fork_server.py: it imports the libraries, and forks a server for each state of the project's code.

A client sends a line of JSON for each server: the directory of the code, the server's address, and the directory of its
stand-ins. The server imports the code and forks a process (forked.py) for each request at its address. One more process
draws the charts of all reports: vl-convert takes half a second to start, and cannot be forked once it has.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jinja2
import psutil
import pydantic
from fork_server import FEWER_COLLECTIONS

LIBRARIES = (
    *("accelerate.tracking", "datasets", "deepspeed", "deepspeed.runtime.superoffload.superoffload_stage3"),
    *("peft", "torch", "torch._subclasses.schema_check_mode", "torch.distributed.fsdp"),
    *("transformers", "transformers.conversion_mapping", "transformers.models.llama.modeling_llama"),
    *("dvc.cli", "dvc.cli.parser", "dvc.dvcfile", "dvc.repo.reproduce", "dvc.repo.stage", "dvc.stage.cache"),
    *("dvc.cachemgr", "dvc.data_cloud", "dvc.dirs", "dvc.rwlock", "dvc.scm", "dvc.utils.strictyaml"),
    *(f"dvc.repo.{name}" for name in ("artifacts", "datasets", "graph", "index", "metrics", "open_repo", "params")),
    *("dvc.repo.plots", "dvc.repo.trie", "dvc_data.hashfile.db.local", "dvc_data.hashfile.status"),
    *("configobj", "dulwich.index", "dulwich.worktree", "fsspec.implementations.memory", "networkx", "pyparsing"),
    *("rich.json", "ruamel.yaml", "scmrepo.git", "scmrepo.noscm", "smart_open", "snakemake.cli"),
    *("snakemake.report.html_reporter", "snakemake.storage"),
    *("jinja2", "peft.tuners.lora.bnb", "pydantic", "scipy.stats", "typer", "vl_convert"),
)
CODE = (
    "cli",
    "report.comparison",
    "config.resolve",
    "data.pack",
    "data.prepare",
    "evaluate.evaluate",
    "fetch.models",
    "config.fingerprint",
    "probe.meta_trial",
    "memory.estimate",
    "memory.table",
    "merge.merge",
    "planner.render",
    "probe.probe_rank",
    "report.report",
    "report.show",
    "train.__main__",
    "train.engines.ddp",
    "train.engines.deepspeed",
    "train.engines.fsdp",
    "train.rank",
)
"""Modules of zerolora, with what they import."""
LARGEST = 1 << 20
"""Bytes of a request."""
MADV_COLLAPSE = 25  # man 2 madvise
LEAST_MEMORY = 8 << 30
"""Bytes that must be free: each server then has its own copy of what the libraries occupy."""


def main() -> None:
    """Import the libraries, and fork a server for each request until all clients have gone."""
    address, lock = sys.argv[1:]
    gc.set_threshold(*FEWER_COLLECTIONS)
    for name in LIBRARIES:
        importlib.import_module(name)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    assert "zerolora" not in sys.modules, "the code is each server's own"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    ended, alive = os.pipe()
    artist = socket.socket(socket.AF_UNIX)
    artist.bind(charts := f"{address}-charts")
    artist.listen(64)
    if not os.fork():
        os.close(alive)
        _draw(artist, ended)
    artist.close()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    os.dup2(2, 1)  # whoever started this process may be gone before it
    clients: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listener, *clients], [], [])
        for client in ready:
            if client is listener:
                clients.append(listener.accept()[0])
                continue
            line = client.recv(LARGEST)
            if line:
                _fork({**json.loads(line), "charts": charts}, client, [listener, *clients], ended, alive)
                continue
            clients.remove(client)
            client.close()
        if not clients and _left(listener, address, lock):
            return


def _left(listener: socket.socket, address: str, lock: str) -> bool:
    """Tell whether nobody is about to come; then the address is no more."""
    with Path(lock).open("w") as file:  # as each does who comes
        fcntl.flock(file, fcntl.LOCK_EX)
        if select.select([listener], [], [], 0)[0]:
            return False
        shutil.rmtree(Path(address).parent)
    return True


def _fork(request: dict[str, str], client: socket.socket, open_: list[socket.socket], ended: int, alive: int) -> None:
    """Fork a server; it tells the client its process id when it is ready, and 0 if it fails."""
    assert threading.active_count() == 1, "a fork keeps no other thread"
    if os.fork():
        return
    os.close(alive)
    for other in open_:
        if other is not client:
            other.close()
    try:
        _serve(**request, client=client, ended=ended)
    except BaseException:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the client has its answer already
            client.sendall(b"0\n")
        os._exit(1)


def _reap(*_: object) -> None:
    """Let servers that were ended go."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _draw(artist: socket.socket, ended: int) -> NoReturn:
    """Draw a chart for each client, from vl-convert's arguments as a line of JSON, until the process that forked this
    one ends. The answer starts with 1, or with 0 before what vl-convert says is wrong."""
    import vl_convert

    waited: list[socket.socket | int] = [artist, ended]
    while ended not in select.select(waited, [], [])[0]:
        client, _ = artist.accept()
        with client, contextlib.suppress(OSError, StopIteration), client.makefile("rw") as lines:
            try:
                answer = "1" + vl_convert.vegalite_to_svg(**json.loads(next(lines)))
            except ValueError as error:
                answer = f"0{error}"
            lines.write(answer)
    os._exit(0)


def _collapse() -> None:
    """Put this process's memory on huge pages, where Linux can: a fork copies the page tables of half a gigabyte."""
    madvise, memory = ctypes.CDLL(None).madvise, psutil.virtual_memory().available
    if memory < LEAST_MEMORY:
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_, inode = line.split()[:5]
        if access == "rw-p" and inode == "0":
            start, stop = (int(number, 16) for number in place.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_COLLAPSE)


def _serve(source: str, address: str, stand_ins: str, charts: str, client: socket.socket, ended: int) -> NoReturn:
    """Import the code, and fork a process for each request until the process that forked this one ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path.insert(0, source)
    for name in CODE:
        importlib.import_module(f"zerolora.{name}")
    importlib.import_module("zerolora.train.engines.deepspeed").DeepSpeedEngine.load_library()
    for model in _models(pydantic.BaseModel):
        model.model_rebuild()
    templates = importlib.import_module("zerolora.report.html").templates()
    for name in templates.list_templates(extensions=["html"]):
        with contextlib.suppress(jinja2.TemplateSyntaxError):  # of a test, for its own command to report
            templates.get_template(name)
    importlib.import_module("snakemake.cli").get_argument_parser()  # looks for plugins in all of sys.path, once
    forked = importlib.import_module("forked")
    gc.collect()
    gc.freeze()
    _collapse()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    client.sendall(f"{os.getpid()}\n".encode())
    client.close()
    clients: dict[int, socket.socket] = {}
    while True:
        waited: list[socket.socket | int] = [listener, read, ended]
        ready, _, _ = select.select(waited, [], [])
        if ended in ready:
            os._exit(0)
        if read in ready:
            os.read(read, 512)
            _report(clients)
        if listener in ready:
            client, _ = listener.accept()
            text, files = _request(client)
            if not text:
                continue
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (*clients.values(), client, listener):
                    other.close()
                for descriptor in (read, write, ended):
                    os.close(descriptor)
                forked.run(json.loads(text), files, Path(stand_ins), charts)
            for file in files:
                os.close(file)
            clients[pid] = client
            with contextlib.suppress(OSError):  # a client that was killed meanwhile
                client.sendall(f"{pid}\n".encode())


def _models(base: type[pydantic.BaseModel]) -> Iterator[type[pydantic.BaseModel]]:
    """Return the project's own models, which are built where they are used first: in each process again."""
    for model in base.__subclasses__():
        if model.__module__.startswith("zerolora."):
            yield model
        yield from _models(model)


def _request(client: socket.socket) -> tuple[bytes, list[int]]:
    """Return what a client asks for, and its standard files; nothing if it was killed before it had said all."""
    text, files = b"", list[int]()
    with contextlib.suppress(ConnectionError):
        text, files, _, _ = socket.recv_fds(client, LARGEST, 3)
        while not text.endswith(b"\n") and (more := client.recv(LARGEST)):
            text += more
    if text.endswith(b"\n"):
        return text, files
    for file in files:
        os.close(file)
    client.close()
    return b"", []


def _report(clients: dict[int, socket.socket]) -> None:
    """Tell clients whose process has ended how it did."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with clients.pop(pid) as client, contextlib.suppress(OSError):
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
