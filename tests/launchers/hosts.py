"""Two hosts with a network, a host name and an sshd of their own, on this one machine.

    with Hosts(folder) as hosts:
        hosts.command("host1", "ssh", "host2", "hostname")

They are Linux namespaces (tests/slurm/pretended.py) that share all files. A key and a configuration of ssh made for the
test replace the system's inside the namespaces alone.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from pretended import WITH_US, Machine, Machines, unplug

COMMANDS = (
    *("mpirun.openmpi", "mpiexec.hydra", "sshd", "ssh", "ssh-keygen", "pdsh"),
    *("ip", "nsenter", "unshare", "setpriv", "hostname"),
)
NAMES = ("host1", "host2")
SWITCH = "switch"
BRIDGE = "bridge"
NETWORK = "10.78.0"  # inside the namespaces only
START_SECONDS = 30
SSHD = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
AcceptEnv *
"""
SSH = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    LogLevel ERROR
"""


def missing() -> str:
    """Return what this machine lacks to make hosts, in one line; empty if nothing."""
    if os.geteuid():
        return "only root can make hosts of namespaces; run as root"
    absent = [command for command in COMMANDS if not _command(command)]
    if absent:
        return f"{', '.join(absent)} missing; `make test` installs them on Debian (tests/launchers/install)"
    tried = subprocess.run(
        [*WITH_US, "unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return f"{tried.stderr.strip()}; run where namespaces may be made" if tried.returncode else ""


class Hosts(Machines):  # type: ignore[misc]  # mypy does not read pytest's pythonpath
    """The hosts, up inside `with`; each runs an sshd, until it is stopped."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def bring_up(self) -> None:
        self._write_files()
        self._start_switch()
        for name in NAMES:
            self.start(name)

    def command(self, host: str, *command: str, directory: Path = Path("/")) -> list[str]:
        """Return the command that runs `command` on a host."""
        return self._machines[host].enter(command, directory)

    def run(
        self,
        host: str,
        *command: str,
        directory: Path = Path("/"),
        environment: Mapping[str, str] | None = None,
        timeout: float = 200,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return how it ended."""
        return self.captured(self.command(host, *command, directory=directory), environment, timeout)

    def start(self, name: str) -> None:
        """Start a host and its sshd, and wait until it answers."""
        mounts = {
            Path("/etc/hosts"): self.folder / "hosts",
            Path("/etc/ssh/ssh_config"): self.folder / "ssh_config",
            Path("/run"): self.folder / "run",
        }
        machine = self._machines[name] = Machine(name, mounts, own_processes=True)
        machine.plug(self._machines[SWITCH], BRIDGE, f"{address(name)}/24")
        sshd = [_command("sshd") or "sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                machine.enter(sshd), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while (done := self.run(name, "ssh", name, "true")).returncode:
            assert time.monotonic() < deadline, f"{done.stderr}\n{(self.folder / f'{name}.log').read_text()}"
            time.sleep(0.1)

    def power_off(self, name: str) -> None:
        """End all processes of a host and unplug it."""
        self._machines.pop(name).power_off()
        self._daemons.pop(name).wait()
        unplug(name, self._machines[SWITCH])

    def _write_files(self) -> None:
        (self.folder / "run/sshd").mkdir(parents=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key")], check=True)
        key = " ".join((self.folder / "key.pub").read_text().split()[:2])
        self._write("known", "".join(f"{name},{address(name)} {key}\n" for name in NAMES))
        self._write("sshd_config", SSHD.format(folder=self.folder))
        self._write("ssh_config", SSH.format(folder=self.folder))
        hosts = {"localhost": "127.0.0.1"} | {name: address(name) for name in NAMES} | {"nowhere": f"{NETWORK}.99"}
        self._write("hosts", "".join(f"{number} {name}\n" for name, number in hosts.items()))

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def _start_switch(self) -> None:
        switch = self._machines[SWITCH] = Machine(SWITCH, {}, own_processes=False)
        switch.network("link", "add", BRIDGE, "type", "bridge")
        switch.network("link", "set", BRIDGE, "up")


def address(name: str) -> str:
    """Return a host's address."""
    return f"{NETWORK}.{NAMES.index(name) + 1}"


def _command(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
