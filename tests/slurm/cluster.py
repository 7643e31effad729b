"""A real Slurm of several nodes on this one machine, with accounting.

    with Cluster(folder) as cluster:
        cluster.run("srun", "--nodes=3", "hostname")

Every node has a network address, a host name and a process table of its own (pretended.py); the login node, where users
and the controller are, is one more. Files are shared by all of them, as on a cluster. The daemons, their state and
their logs live in `folder`, their network in a namespace: nothing of the system's is touched, and any number of
clusters can be up at once. docs/slurm.md says what the tests do with it.
"""

import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pretended import WITH_US, Machine, Machines, unplug

COMMANDS = (
    *("unshare", "nsenter", "setpriv", "ip", "hostname"),
    *("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "srun", "sacctmgr"),
)
NODES = ("node1", "node2", "node3")
GPUS = 4  # of each node: copies of /dev/null, which Slurm hands out as it would GPUs
ACCOUNT = "lab"
BRIDGE = "switch"
NETWORK = "10.77.0"  # inside the namespaces only
LOGIN = "login"
DATABASE_PORT = 3306
START_SECONDS = 60
POLL_SECONDS = 0.5  # most conditions ask Slurm by a command, which takes 0.02 CPU-seconds
# A MAC address that nobody has: what is sent to it is lost without a word, as on a cut cable.
NOWHERE = "02:00:00:00:00:01"

SLURM_CONF = """\
ClusterName=tests
SlurmctldHost={login}({network}.1)
SlurmUser=root
# A requeued job waits until its credential has expired.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
# What needs no control groups and no second core.
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
JobAcctGatherType=jobacct_gather/linux
# Jobs that last seconds are measured too.
JobAcctGatherFrequency=1
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
MpiDefault=none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={network}.1
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
# Unknown accounts and qualities of service are refused.
AccountingStorageEnforce=associations,qos
# Jobs that ended can still be queried.
MinJobAge=86400
# A lost node, a killed job and a free node are noticed within seconds.
ReturnToService=2
SlurmdTimeout=15
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
# Version 1 of control groups: version 2 needs systemd on each node.
CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0
"""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
NODE = "NodeName={name} NodeAddr={address} CPUs=32 RealMemory=256000 Gres=gpu:{gpus}\n"
# A job of `urgent` sends those of `normal` back to the queue, and ends those of `spare`.
PARTITIONS = """\
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1
PartitionName=spare Nodes=ALL PriorityTier=1 PreemptMode=CANCEL
PartitionName=urgent Nodes=ALL PriorityTier=10
"""
SLURMDBD_CONF = """\
DbdHost={login}
DbdAddr={network}.1
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={port}
StorageUser=root
StorageLoc=slurm
"""


class Cluster(Machines):  # type: ignore[misc]  # mypy does not read pytest's pythonpath
    """A login node with the controller and the accounting, and three compute nodes; all up inside `with`."""

    def __init__(self, folder: Path, limits_memory: bool = False) -> None:
        """With `limits_memory`, jobs that use more than they requested are killed: see lacking_for_limits."""
        super().__init__()
        self.folder, self.limits_memory = folder, limits_memory

    def bring_up(self) -> None:
        self._write_files()
        self._start_login()
        self._start_accounting()
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.wait_idle(START_SECONDS)

    # What a user does on the login node.

    def command(self, *command: str, directory: Path = Path("/")) -> list[str]:
        """Return the command that runs `command` on the login node; its process id is the one seen here."""
        return self._machines[LOGIN].enter(command, directory)

    def run(
        self,
        *command: str,
        directory: Path = Path("/"),
        environment: dict[str, str] | None = None,
        check: bool = True,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node and return how it ended."""
        result = self.captured(self.command(*command, directory=directory), environment, timeout)
        if check:
            assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
        return result

    def on(self, node: str, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a compute node, past Slurm, and return how it ended."""
        return self.captured(self._machines[node].enter(command), None, timeout)

    def sacct(self, job: str, *fields: str) -> list[str]:
        """Return these fields of a job from accounting."""
        return self.sacct_steps(job, *fields, options=("-X",))[0]

    def sacct_steps(self, job: str, *fields: str, options: tuple[str, ...] = ()) -> list[list[str]]:
        """Return these fields of a job and of each of its steps."""
        text = self.run("sacct", *options, "-n", "-P", "-j", job, "-o", ",".join(fields)).stdout
        return [line.split("|") for line in text.splitlines()]

    def jobs(self, comment: str, directory: Path) -> list[str]:
        """Return the ids of all jobs with this comment that were submitted in `directory`, oldest first; of
        Snakemake's jobs the comment names rule and run."""
        lines = self.run("squeue", "-h", "-t", "all", "-S", "i", "-o", "%A|%Z|%k").stdout.splitlines()
        result = [line.split("|", 2) for line in lines]
        return [job for job, place, text in result if (place, text) == (str(directory), comment)]

    def job_state(self, job: str) -> str:
        """Return a job's state from the controller, as in RUNNING."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()

    def wait_job_state(self, job: str, state: str, seconds: float) -> None:
        """Wait until a job is in this state."""
        self.wait(lambda: self.job_state(job) == state, f"job {job} is {state}", seconds)

    def wait_idle(self, seconds: float) -> None:
        """Wait until every node is up and free."""
        self.wait(lambda: self._states() == {"idle"}, "all nodes are idle", seconds)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until a condition holds; fail with what was waited for, and the daemons' last words."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [name for name, process in self._daemons.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = [f"{log.stem}: {_last_lines(log)}" for log in sorted(self.folder.glob("*.log"))]
                why = f"{', '.join(ended)} ended" if ended else f"not within {seconds:g} s"
                raise AssertionError("\n".join([f"waited until {what}: {why}", *logs]))
            time.sleep(POLL_SECONDS)

    # What happens to clusters.

    def stop_node(self, node: str) -> None:
        """Cut a node's power: it falls silent, and all its processes are gone."""
        self._machines[LOGIN].network("link", "set", f"to-{node}", "down")
        self._machines.pop(node).power_off()
        self._daemons.pop(_slurmd(node)).wait()
        unplug(node, self._machines[LOGIN])

    def start_node(self, node: str) -> None:
        """Start a node, for the first time or again."""
        machine = Machine(node, self._mounts(), own_processes=True)
        self._machines[node] = machine
        machine.plug(self._machines[LOGIN], BRIDGE, f"{_address(node)}/24")
        self._start_slurmd(node)

    def kill_slurmd(self, node: str) -> None:
        """Kill Slurm's daemon of a node; the jobs there live on, unseen."""
        process = self._daemons.pop(_slurmd(node))
        self.on(node, "sh", "-c", f"kill -KILL $(cat {self.folder}/slurmd-{node}.pid)")
        process.wait()

    def start_missing_nodes(self) -> None:
        """Start the nodes that were stopped, or lack their daemon, and wait until they take jobs."""
        for node in NODES:
            if node not in self._machines:
                self.start_node(node)
            elif _slurmd(node) not in self._daemons:
                self._start_slurmd(node)
        self.wait(lambda: self._states() <= {"idle", "mixed", "allocated"}, "all nodes are back", START_SECONDS)

    def stop_controller(self) -> None:
        """End the controller, which writes down its state first; jobs that run continue, nobody answers users."""
        process = self._daemons.pop("slurmctld")
        process.terminate()
        process.wait()

    def start_controller(self) -> None:
        """Start the controller, for the first time or again."""
        self._daemon(LOGIN, "slurmctld", "slurmctld", "-D")
        self.wait(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld answers", START_SECONDS)

    def cut(self, node: str, other: str) -> None:
        """Lose everything that two nodes send each other."""
        for sender, receiver in ((node, other), (other, node)):
            self._machines[sender].network(
                *("neighbour", "replace", _address(receiver), "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
            )

    def reconnect(self, node: str, other: str) -> None:
        """Let two nodes hear each other again."""
        for sender, receiver in ((node, other), (other, node)):
            self._machines[sender].network("neighbour", "delete", _address(receiver), "dev", "eth0")

    # How it is built.

    def _write_files(self) -> None:
        task = "task/cgroup" if self.limits_memory else "task/none"
        known = {"folder": self.folder, "login": LOGIN, "network": NETWORK, "port": DATABASE_PORT, "task": task}
        nodes = "".join(NODE.format(name=node, address=_address(node), gpus=GPUS) for node in NODES)
        for name in ("etc", "munge", "state", "gpus"):
            (self.folder / name).mkdir(parents=True)
        for number in range(GPUS):
            os.mknod(self.folder / f"gpus/gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        self._write("etc/slurm.conf", SLURM_CONF.format(**known) + nodes + PARTITIONS)
        self._write("etc/gres.conf", f"Name=gpu File={self.folder}/gpus/gpu[0-{GPUS - 1}]\n")
        self._write("etc/cgroup.conf", CGROUP_CONF)
        self._write("etc/slurmdbd.conf", SLURMDBD_CONF.format(**known))
        hosts = {"localhost": "127.0.0.1", LOGIN: f"{NETWORK}.1"} | {node: _address(node) for node in NODES}
        self._write("hosts", "".join(f"{address} {name}\n" for name, address in hosts.items()))

    def _write(self, name: str, text: str | bytes) -> None:
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(0o600)  # slurmdbd and munged refuse files that others can read

    def _mounts(self) -> dict[Path, Path]:
        # Not SLURM_CONF: Snakemake's jobs take it out of their environment.
        return {Path("/etc/slurm"): self.folder / "etc", Path("/etc/hosts"): self.folder / "hosts"}

    def _start_login(self) -> None:
        login = Machine(LOGIN, self._mounts(), own_processes=False)
        self._machines[LOGIN] = login
        login.network("link", "add", BRIDGE, "type", "bridge")
        login.network("address", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        login.network("link", "set", BRIDGE, "up")
        self._write("munge/key", secrets.token_bytes(128))
        places = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge/{name}" for option, name in places.items()]
        self._daemon(LOGIN, "munged", "munged", "--foreground", "--force", *options)

    def _start_accounting(self) -> None:
        data, temporary = self.folder / "database", self.folder / "temporary"
        temporary.mkdir()  # of its own: a server that starts removes every temporary table that it sees
        own = ("--no-defaults", f"--datadir={data}", f"--tmpdir={temporary}", "--user=root")
        quick = (*own, "--innodb-log-file-size=8M")
        self.run("mariadb-install-db", *quick, "--auth-root-authentication-method=normal", "--skip-test-db")
        # Without grants: only this network namespace reaches it.
        options = ("--skip-grant-tables", "--bind-address=127.0.0.1", f"--port={DATABASE_PORT}")
        places = (f"--socket={self.folder}/database.socket", f"--pid-file={self.folder}/database.pid")
        flush = "--innodb-flush-log-at-trx-commit=0"  # nothing here is worth a wait for the disk
        self._daemon(LOGIN, "mariadbd", "mariadbd", *quick, *options, *places, flush)
        self.wait((self.folder / "database.socket").exists, "MariaDB listens", START_SECONDS)
        self._daemon(LOGIN, "slurmdbd", "slurmdbd", "-D")
        command = ("sacctmgr", "-i", "add", "cluster", "tests")
        self.wait(lambda: self.run(*command, check=False).returncode == 0, "slurmdbd answers", START_SECONDS)
        self.run("sacctmgr", "-i", "add", "account", ACCOUNT)
        self.run("sacctmgr", "-i", "add", "user", "root", f"account={ACCOUNT}")

    def _start_slurmd(self, node: str) -> None:
        self._daemon(node, _slurmd(node), "slurmd", "-D")

    def _daemon(self, machine: str, name: str, daemon: str, *options: str) -> None:
        command = [_found(daemon) or daemon, *options]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self._machines[machine].enter(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _states(self) -> set[str]:
        return set(self.run("sinfo", "-h", "-N", "-o", "%T", check=False).stdout.split())


def missing() -> str:
    """Return what this machine lacks to pretend a cluster, in one line; nothing if it lacks nothing."""
    if os.geteuid():
        return "only root can pretend machines (namespaces); run as root"
    absent = [command for command in COMMANDS if not _found(command)]
    if absent:
        return f"{', '.join(absent)} not found; `make test` installs them on Debian (tests/slurm/install)"
    tried = subprocess.run(
        [*WITH_US, "unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    return f"{tried.stderr.strip()}; run where namespaces may be made" if tried.returncode else ""


def lacking_for_limits() -> str:
    """Return what this machine lacks to limit the memory of jobs, in one line; nothing if it lacks nothing."""
    if not (MEMORY_GROUPS / "release_agent").is_file() or not os.access(MEMORY_GROUPS, os.W_OK):
        return f"{MEMORY_GROUPS} is no writable memory controller of control groups, version 1"
    return ""


def remove_memory_groups() -> None:
    """Remove the control groups of nodes that have ended."""
    for node in NODES:
        for group in sorted((MEMORY_GROUPS / f"slurm_{node}").glob("**/"), reverse=True):
            group.rmdir()


def _found(command: str) -> str | None:
    # A root by `su` may have no folder of daemons on its PATH.
    return shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _slurmd(node: str) -> str:
    return f"slurmd-{node}"


def _address(node: str) -> str:
    return f"{NETWORK}.{11 + NODES.index(node)}"


def _last_lines(log: Path, count: int = 8) -> str:
    return "\n  ".join(log.read_text(errors="replace").splitlines()[-count:])
