"""A machine that is pretended: a network, a host name, mounts and (if wanted) a process table of its own.

It is made of Linux namespaces by unshare and nsenter, so nothing outside it changes. All its processes end with the
process that made it, however that one ends.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

# The machine's first process: it makes the machine and then reaps the orphans that daemons leave, as an init does.
INIT = """
set -e
hostname "$1"
shift
ip link set lo up
mount -t tmpfs tmpfs /dev/shm
while [ $# -gt 0 ]; do mount --bind "$1" "$2"; shift 2; done
echo up
exec >/dev/null
[ $$ = 1 ] || exec sleep infinity
while :; do sleep 3600 & wait; done
"""
# A process that is started with this dies with the process that started it.
WITH_US = ("setpriv", "--pdeathsig", "KILL")


class Machine:
    """One machine, up until `power_off`.

    `mounts` are files or folders that it sees in place of others. With `own_processes` it has a process table of its
    own, and everything on it ends at once; without, a command's process id is the one seen outside.
    """

    def __init__(self, name: str, mounts: Mapping[Path, Path], own_processes: bool) -> None:
        self.name = name
        self._namespaces = ["--net", "--uts", "--mount", *(["--pid"] if own_processes else [])]
        table = ["--fork", "--kill-child", "--mount-proc"] if own_processes else []
        pairs = [str(path) for place, source in mounts.items() for path in (source, place)]
        self._holder = subprocess.Popen(
            [*WITH_US, "unshare", *self._namespaces, *table, "sh", "-c", INIT, "init", name, *pairs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout and self._holder.stderr
        if self._holder.stdout.readline() != "up\n":
            raise OSError(f"{name} cannot be made: {self._holder.stderr.read().strip()}")
        holder = self._holder.pid
        self._pid = int(Path(f"/proc/{holder}/task/{holder}/children").read_text()) if own_processes else holder

    def enter(self, command: Iterable[str], directory: Path = Path("/")) -> list[str]:
        """Return the command that runs `command` on the machine, in `directory`."""
        inside = ["env", "--chdir", str(directory), *command]
        return [*WITH_US, "nsenter", "--target", str(self._pid), *self._namespaces, "--", *inside]

    def network(self, *command: str) -> None:
        """Run a command of iproute2 in the machine's network."""
        # Only the network is entered: `ip` takes a process id of the outer table.
        network = f"--net=/proc/{self._pid}/ns/net"
        subprocess.run(["nsenter", network, "--", "ip", *command], check=True, stdin=subprocess.DEVNULL)

    def plug(self, switch: "Machine", bridge: str, address: str) -> None:
        """Put a cable between this machine, as its eth0 with `address`, and the `bridge` of another."""
        cable = f"to-{self.name}"
        switch.network("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        switch.network("link", "set", cable, "master", bridge, "up")
        self.network("address", "add", address, "dev", "eth0")
        self.network("link", "set", "eth0", "up")

    def processes(self) -> list[psutil.Process]:
        """Return the machine's processes."""
        own = Path(f"/proc/{self._pid}/ns/uts").readlink()
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # ended meanwhile
                if Path(f"/proc/{process.pid}/ns/uts").readlink() == own:
                    result.append(process)
        return result

    def power_off(self) -> None:
        """End every process of the machine at once."""
        self._holder.kill()
        self._holder.communicate()


def unplug(machine: str, switch: Machine) -> None:
    """Take away the cable of a machine, whether or not it is still up. Where it is not, the kernel may be faster."""
    with contextlib.suppress(subprocess.CalledProcessError):
        switch.network("link", "delete", f"to-{machine}")


class Machines:
    """Machines and their daemons, up inside `with`."""

    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def bring_up(self) -> None:
        """Make the machines and start the daemons."""
        raise NotImplementedError

    def captured(
        self, command: list[str], environment: Mapping[str, str] | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return how it ended; where it hangs, fail with what the machines' processes wait for."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            # SIGABRT has Python print what each thread is at.
            environment = {"PYTHONFAULTHANDLER": "1"} | dict(os.environ if environment is None else environment)
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                waiting = [] if process.returncode is not None else self._aborted()
                process.kill()
                process.wait()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
        assert code is not None, "\n".join([f"{' '.join(command)} hangs", *texts, *waiting])
        return subprocess.CompletedProcess(command, code, *texts)

    def _aborted(self) -> list[str]:
        """Return a line for each process of the machines, and abort those of Python."""
        processes = [process for machine in self._machines.values() for process in machine.processes()]
        lines, aborted = [], []
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                waits = Path(f"/proc/{process.pid}/wchan").read_text()
                lines.append(f"{process.pid} {process.ppid()} {process.status()} {waits} {' '.join(process.cmdline())}")
                if "python" in process.exe():
                    process.send_signal(signal.SIGABRT)
                    aborted.append(process)
        psutil.wait_procs(aborted, timeout=10)  # they end once they have printed
        return lines

    def __enter__(self) -> Self:
        try:
            self.bring_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of the machines."""
        for machine in self._machines.values():
            machine.power_off()
        for process in self._daemons.values():
            process.kill()
            process.wait()
        self._machines.clear()
        self._daemons.clear()
