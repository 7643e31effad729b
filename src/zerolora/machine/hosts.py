"""Run a command on each of a list of hosts, over ssh, as one task a host:

    python -m zerolora.machine.hosts HOST HOST … -- COMMAND …

The hosts share the project's folder and its environment. Before the command starts, each host is checked: it answers
without a password, sees this folder and resolves the first host. A task gets its number (PET_NODE_RANK, PET_NNODES) and
the rendezvous (MASTER_ADDR, MASTER_PORT) in its environment, its folder and command as JSON on stdin, and signals as
lines on stdin (host_task.py), so that no shell reads any of them. When a task fails, the others are ended.
"""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from zerolora.errors import UserError, shown
from zerolora.machine.host_task import GRACE_SECONDS

PREFIX = "zerolora: "  # as in log.py, which takes longer to load than all of this
TASK = Path(__file__).with_name("host_task.py")
CONNECT_SECONDS = 5
CHECK_SECONDS = 20
"""From the start of ssh to a host's answer."""
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
"""Without questions to the user; a connection without an answer for a minute is lost."""
LOST = 255
"""Exit code of ssh where the connection failed."""
STOPPED = 75
"""Exit code of a training that saved and stopped on request (train/launch/stop_signals.py)."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CAUSE_SECONDS = 5.0
"""How long other tasks may take to end by themselves after one has failed."""
POLL_SECONDS = 0.1
OWN = re.compile(
    r"(HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|OLDPWD|TMPDIR|TEMP|TMP|DISPLAY|SSH_.*|XDG_.*|DBUS_.*"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|PET_.*)"
)
"""Variables that each host has itself, or that number the processes of another launcher."""
HOST = re.compile(r"([\w.-]+@)?\w[\w.:-]*")


def main(arguments: list[str]) -> int:
    """Check the hosts and run the command on each; return its exit code, 2 after an error."""
    try:
        hosts, command = parsed(arguments)
        return run(hosts, command, check(hosts, os.environ))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"{PREFIX}{line}", file=sys.stderr)
    return 2


def parsed(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return hosts and command. Raises UserError for anything that is not a list of different hosts."""
    if "--" not in arguments:
        raise UserError("hosts: give the hosts, then --, then the command, as in node1 node2 -- COMMAND")
    at = arguments.index("--")
    hosts, command = arguments[:at], arguments[at + 1 :]
    for host in hosts:
        if not HOST.fullmatch(host):
            raise UserError(f"hosts: {shown(host)} is not the name of a host; give names or addresses, as in node1")
        if hosts.count(host) > 1:
            raise UserError(f"hosts: {host} is listed twice; list each host once, a task starts all of its ranks")
    if not hosts or not command:
        raise UserError("hosts: no host or no command; give node1 node2 -- COMMAND (profiles/hosts/config.yaml)")
    return hosts, command


def check(hosts: list[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Return address and port of the rendezvous. Raises UserError with a line for each host that cannot be used."""
    address = environment.get("MASTER_ADDR") or hosts[0].rpartition("@")[2]
    folder = Path.cwd()
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix=".zerolora-hosts-") as file,
        ThreadPoolExecutor(len(hosts)) as pool,
    ):
        request = {"folder": str(folder), "file": Path(file.name).name, "address": address}
        answers = list(pool.map(lambda host: _answer(host, request), hosts))
    faults = [f"{host}: {answer}" for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, str)]
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            continue
        if not answer["sees"]:
            faults.append(f"{host}: does not see {folder}; mount the same folder there, at the same path")
        elif not answer["resolves"]:
            faults.append(f"{host}: does not resolve {address}, the first host; list it by address, or set MASTER_ADDR")
    if faults:
        raise UserError("\n".join(faults))
    first = answers[0]
    assert not isinstance(first, str)
    return address, environment.get("MASTER_PORT") or str(first["port"])


def _answer(host: str, request: dict[str, Any]) -> dict[str, Any] | str:
    """Return a host's answer to a check, or the fault that prevents one."""
    try:
        done = subprocess.run(
            remote(host), input=json.dumps(request) + "\n", capture_output=True, text=True, check=False,
            timeout=CHECK_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer over ssh within {CHECK_SECONDS} s; try `ssh {host} true`"
    except OSError as error:
        raise UserError(f"ssh cannot be started: {error.strerror}; install OpenSSH's client") from error
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode == LOST:
        return f"not reached over ssh: {last}; try `ssh {host} true`, which must ask for nothing"
    if done.returncode:
        return f"does not start {sys.executable} {TASK}: {last}; mount the same folders there, at the same paths"
    try:
        # A shell's startup file may print lines before it.
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"answers {shown(done.stdout)} to a check; its shell's startup files must not print after it"
    return answer


def remote(host: str) -> list[str]:
    """Return the command that starts host_task.py on a host."""
    return [*SSH, "--", host, shlex.join([sys.executable, "-I", str(TASK)])]


def run(hosts: list[str], command: list[str], meeting: tuple[str, str]) -> int:
    """Run the command on all hosts; return 0, STOPPED, or the exit code of the first that failed, which is named."""
    tasks = HostTasks(hosts)
    for each in SIGNALS:
        signal.signal(each, lambda number, _: tasks.asked.append(signal.Signals(number).name))
    inherited = {name: value for name, value in os.environ.items() if not OWN.fullmatch(name)}
    secret = secrets.token_hex(32)  # of the ranks (train/launch/signed.py)
    for number, host in enumerate(hosts):
        environment = {
            **inherited,
            **{"PET_NODE_RANK": str(number), "PET_NNODES": str(len(hosts))},
            **{"MASTER_ADDR": meeting[0], "MASTER_PORT": meeting[1], "ZEROLORA_NODES": ",".join(hosts)},
            **{"ZEROLORA_SECRET": secret},
        }
        tasks.start(host, {"command": command, "folder_of_command": str(Path.cwd()), "environment": environment})
    return tasks.wait()


class HostTasks:
    """The ssh clients of the hosts."""

    def __init__(self, hosts: list[str]) -> None:
        self._hosts = hosts
        self._clients: dict[str, subprocess.Popen[bytes]] = {}
        self._printers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.asked: list[str] = []
        """Signals that `wait` has yet to send. A handler cannot: it may interrupt a write."""

    def start(self, host: str, request: dict[str, Any]) -> None:
        """Start the task of a host. Its output has the host's name before each line."""
        client = subprocess.Popen(
            remote(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches tasks as a line on stdin
        )
        self._clients[host] = client
        assert client.stdout and client.stderr
        for source, target in ((client.stdout, sys.stdout.buffer), (client.stderr, sys.stderr.buffer)):
            thread = threading.Thread(target=self._print, args=[host, source, target], daemon=True)
            thread.start()
            self._printers.append(thread)
        self._write(client, json.dumps(request))

    def send(self, name: str) -> None:
        """Send a signal to all tasks."""
        for client in list(self._clients.values()):
            self._write(client, name)

    def wait(self) -> int:
        """Wait until all tasks have ended. Once one has failed, end the others."""
        failed: dict[str, int] = {}
        deadline = kill = float("inf")
        while None in (codes := {host: client.poll() for host, client in self._clients.items()}).values():
            failed |= {host: code for host, code in codes.items() if code and code != STOPPED and host not in failed}
            if failed and deadline == float("inf"):
                deadline = time.monotonic() + CAUSE_SECONDS
                kill = deadline + GRACE_SECONDS + CONNECT_SECONDS
            while self.asked:
                self.send(self.asked.pop(0))
            if time.monotonic() > deadline:
                self._close()
            if time.monotonic() > kill:
                for client in self._clients.values():
                    client.kill()
            time.sleep(POLL_SECONDS)
        for printer in self._printers:
            printer.join()
        ended = {host: client.returncode for host, client in self._clients.items()}
        failed |= {host: code for host, code in ended.items() if code and code != STOPPED and host not in failed}
        for host, code in failed.items():
            print(f"{PREFIX}{host}: {_reason(code)}", file=sys.stderr)
            return 2 if code in (2, LOST) or code < 0 else code
        return max(ended.values())

    def _close(self) -> None:
        for client in self._clients.values():
            if client.stdin and not client.stdin.closed:
                client.stdin.close()

    def _write(self, client: "subprocess.Popen[bytes]", line: str) -> None:
        assert client.stdin
        try:
            client.stdin.write(line.encode() + b"\n")
            client.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # the task has ended, or is being ended

    def _print(self, host: str, source: IO[bytes], target: IO[bytes]) -> None:
        for line in source:
            with self._lock:
                target.write(f"{host}: ".encode() + line)
                target.flush()


def _reason(code: int) -> str:
    if code == LOST:
        return "the connection over ssh was lost; run the same command to resume"
    if code > 128:
        return f"the task was ended by {signal.Signals(code - 128).name}"
    return f"the task ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
