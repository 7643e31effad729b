"""The ranks that a process starts, and the rendezvous of all ranks, from its environment.

By itself a process starts all ranks of one machine. Under a launcher (srun, mpirun, flux), started once a node or once
a rank, it starts those of its task. With RANK and LOCAL_RANK set (torchrun, wrappers), it is that rank; with RANK
alone, as in a pod of a PyTorchJob, WORLD_SIZE determines whether it is a rank or a node. The ranks of a node are always
consecutive: DeepSpeed and torch divide ranks into nodes that way.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NoReturn

from zerolora.errors import UserError, shown
from zerolora.train.launch.signed import SECRET, common_secret, new_secret
from zerolora.units import counted

FIRST_PORT, PORTS = 20_000, 12_000  # of Slurm jobs
LISTENER = "ZEROLORA_LISTENER"
"""The file descriptor of the listening socket for the rendezvous on one machine (rendezvous.py)."""
LAUNCHER = "ZEROLORA_LAUNCHER"
"""The launcher's process id; a rank with another parent has lost its launcher (stop_signals.py)."""
NODES = "ZEROLORA_NODES"
"""The names of the nodes in their order, separated by commas, for messages."""
TORCH_PORT = 29500
"""Port of the rendezvous if a launcher sets none: that of torch's own launchers."""


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher numbers the tasks that it starts."""

    command: str
    number: str
    count: str
    local: tuple[str, ...]
    """The task's number on its node; the first that is set counts."""


SRUN = Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",))
PODS = Launcher("Kubeflow", "PET_NODE_RANK", "PET_NNODES", ())
"""A pod of a PyTorchJob or TrainJob (Kubeflow's training operator), or a host of a list (machine/hosts.py): torchrun's
options, which number nodes."""
LAUNCHERS = (
    # Before srun's, since mpirun starts its daemons with srun; PMI's last, since srun may set them too.
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    Launcher("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",)),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_LOCAL_RANK",)),
    Launcher("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",)),
    SRUN,
    Launcher("mpiexec", "PALS_RANKID", "PMI_SIZE", ("PALS_LOCAL_RANKID",)),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
)
"""Launchers that zerolora knows. Sources: Open MPI's and MVAPICH2's user guides, IBM's JSM, flux-shell(1),
srun(1), PALS, and Hydra (MPICH, Intel MPI)."""
PMIX_RANK = "PMIX_RANK"
"""A task's number under any PMIx launcher. PMIx sets no number of tasks, so it is never enough."""
POD_RANKS, POD_ADDRESS, POD_PORT = "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"
FOREIGN = (
    *(name for each in (*LAUNCHERS, PODS) if each is not SRUN for name in (each.number, each.count, *each.local)),
    *(PMIX_RANK, POD_RANKS, POD_ADDRESS, POD_PORT),
)
"""Variables that ranks do not inherit: DeepSpeed would compare some with its own, and later commands would take others
for their launcher's."""


@dataclass(frozen=True)
class Topology:
    """The ranks of this process, and the rendezvous of all ranks."""

    ranks: range
    world_size: int
    ranks_per_node: int
    address: str
    port: int
    listener: socket.socket | None = None
    """Listens at that port where one process starts all ranks; rank 0 inherits it (rendezvous.py)."""
    nodes: tuple[str, ...] = ()
    """The names of the nodes, if the launcher tells them."""
    secret: str = field(default="", repr=False)
    """Known to the ranks alone, for what they tell each other (signed.py)."""

    def start(
        self, rank: int, command: list[str], environment: Mapping[str, str], output: IO[bytes] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start `command` as one rank, with output to the file `output`, or to that of this process."""
        kept = [self.listener.fileno()] if self.listener and not rank else []
        variables = {**environment, **self.environment(rank)}
        return subprocess.Popen(command, env=variables, stdout=output, stderr=output, pass_fds=kept)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that torch.distributed, DeepSpeed and this package read, for one rank."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            LAUNCHER: str(os.getpid()),
            NODES: ",".join(self.nodes),
            SECRET: self.secret,
        } | ({LISTENER: str(self.listener.fileno())} if self.listener else {})


def with_secret(where: Topology, environment: Mapping[str, str], shared: Path) -> Topology:
    """Return the topology with a secret for its ranks: a new one where this process starts all of them, else that of
    the environment, or of the folder `shared`, which all nodes have."""
    if where.world_size == 1:
        return where
    own = len(where.ranks) == where.world_size
    return replace(where, secret=new_secret() if own else environment.get(SECRET) or common_secret(shared))


def topology(environment: Mapping[str, str], nodes: int, ranks_per_node: int) -> Topology:
    """Return this process's part of `nodes` x `ranks_per_node` ranks.

    Raises UserError if the environment has another number of processes than the config, or contradicts itself.
    """
    pod = _pod(environment, nodes, ranks_per_node)
    if pod is not None and nodes > 1:
        return _of_task(pod, environment, nodes, ranks_per_node)
    if pod is not None:
        return _own_topology(ranks_per_node)
    if "RANK" in environment:
        return _given_rank(environment, nodes, ranks_per_node)
    started = _started(environment)
    if started and not started.count == nodes == 1:
        return _of_task(started, environment, nodes, ranks_per_node)
    if not started:
        _refuse_uncounted(environment)
    if nodes > 1:
        raise UserError(
            f"train.nodes is {nodes}, but this command was started once, on one machine; inside a Slurm job start "
            "it with srun, one task a node (profiles/slurm does so), or set train.nodes to 1"
        )
    return _own_topology(ranks_per_node)


@dataclass(frozen=True)
class Started:
    """This process among the tasks of a launcher."""

    launcher: Launcher
    number: int
    count: int
    local: int | None
    """Its number on its node."""
    source: str
    """The variable of `local`."""


def _started(environment: Mapping[str, str]) -> Started | None:
    """Return this process's place among a launcher's tasks; None if no launcher started it."""
    for launcher in LAUNCHERS:
        if launcher.number not in environment:
            continue
        # Only a step started by srun has a task id; a plain command in a job's script does not.
        if launcher is SRUN and "SLURM_STEP_ID" not in environment:
            continue
        count = launcher.count
        if launcher is SRUN and count not in environment:
            count = "SLURM_NTASKS"
        if count not in environment:
            continue
        source = next((name for name in launcher.local if name in environment), "")
        local = _number(environment, source) if source else None
        return Started(launcher, _number(environment, launcher.number), _number(environment, count), local, source)
    return None


def _refuse_uncounted(environment: Mapping[str, str]) -> None:
    """Raise UserError if a launcher numbers its tasks, but does not count them: each would train by itself."""
    numbers = [launcher.number for launcher in LAUNCHERS if launcher is not SRUN]
    for name in (*numbers, PMIX_RANK):
        if name in environment:
            raise UserError(
                f"{name} is {shown(environment[name])}, but the launcher's number of tasks is not set; export RANK, "
                f"LOCAL_RANK, WORLD_SIZE and MASTER_ADDR in a wrapper, or unset {name}"
            )


def _pod(environment: Mapping[str, str], nodes: int, ranks_per_node: int) -> Started | None:
    """Return this process as a node, where RANK is a pod's; None where it is a rank's, or not set.

    A PyTorchJob numbers its pods in RANK, and counts in WORLD_SIZE pods, or with nprocPerNode ranks; a pod has no
    LOCAL_RANK, unless torchrun runs in it. Raises UserError if the variables contradict each other or the config.
    """
    if "LOCAL_RANK" in environment or not {"RANK", PODS.number} & environment.keys():
        return None
    in_pod = PODS.number in environment
    if not in_pod and (environment.get("WORLD_SIZE") != str(nodes) or _by_rank(environment)):
        return None
    number = _number(environment, PODS.number if in_pod else "RANK")
    count = _number(environment, PODS.count) if PODS.count in environment else nodes
    each = environment.get(POD_RANKS, str(ranks_per_node))
    if count != nodes or each not in ("auto", "cpu", "gpu", "1", str(ranks_per_node)):
        raise UserError(
            f"{PODS.count} is {count} and {POD_RANKS} is {shown(each)}, but the config asks for {nodes} nodes x "
            f"{ranks_per_node} ranks; start it on {nodes} hosts, or in pods with nprocPerNode: {ranks_per_node}"
        )
    if "RANK" in environment and _number(environment, "RANK") != number:
        raise UserError(
            f"RANK is {environment['RANK']} but {PODS.number} is {number}, and LOCAL_RANK is not set; unset one of them"
        )
    world = environment.get("WORLD_SIZE")
    counted_by = [int(each)] if POD_RANKS in environment and each.isdecimal() else [1, ranks_per_node]
    if world is not None and world not in [str(nodes * ranks) for ranks in counted_by]:
        raise UserError(
            f"WORLD_SIZE is {shown(world)}, but the config asks for {nodes} nodes x {ranks_per_node} ranks; start "
            f"{nodes} pods, or change train.nodes and ranks_per_node"
        )
    if number >= count:
        raise UserError(f"{PODS.number if in_pod else 'RANK'} is {number} of {count} pods; they are 0 to {count - 1}")
    return Started(PODS, number, count, None, "")


def _by_rank(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher numbers this process among ranks as RANK does, which a wrapper has then exported."""
    started = _started(environment)
    return started is not None and started.local is not None and str(started.number) == environment["RANK"]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(f"{name} is {shown(text)}, which is no number; unset it, or correct what sets it")
    return int(text)


def _own_topology(ranks: int) -> Topology:
    """Return the topology of a process that starts all ranks, on this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    return Topology(range(ranks), ranks, ranks, address, port, listener)


def _given_rank(environment: Mapping[str, str], nodes: int, ranks_per_node: int) -> Topology:
    """Return the topology of the rank in RANK, as torchrun and wrappers set it."""
    world = nodes * ranks_per_node
    if environment.get("WORLD_SIZE") != str(world):
        raise UserError(
            f"WORLD_SIZE is {environment.get('WORLD_SIZE')} but the config asks for {nodes} nodes x "
            f"{ranks_per_node} ranks; start {world} processes, or change train.nodes and ranks_per_node"
        )
    if environment.get("LOCAL_WORLD_SIZE", str(ranks_per_node)) != str(ranks_per_node):
        raise UserError(
            f"LOCAL_WORLD_SIZE is {environment['LOCAL_WORLD_SIZE']}, but train.ranks_per_node is {ranks_per_node}; "
            f"start {ranks_per_node} processes on each node (torchrun --nproc-per-node), or change it"
        )
    rank = _number(environment, "RANK")
    if rank >= world:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {world}; ranks are 0 to {world - 1}: correct what sets RANK")
    local = {"LOCAL_RANK": _number(environment, "LOCAL_RANK")} if "LOCAL_RANK" in environment else {}
    started = _started(environment)
    # A launcher may have started torchrun, whose tasks are its own: then its numbers say nothing of the rank.
    if started and started.local is not None and (started.number, started.count) == (rank, world):
        local[started.source] = started.local
    if not local and nodes > 1:
        raise UserError(
            "RANK is set, but LOCAL_RANK, the rank's number on its node, is not; export it too, or start the command "
            "with torchrun"
        )
    if len(set(local.values())) > 1:
        values = " but ".join(f"{name} is {value}" for name, value in local.items())
        raise UserError(f"{values}; unset LOCAL_RANK, or export it as the rank's number on its node")
    for name, value in local.items():
        if value != rank % ranks_per_node:
            _refuse_order(f"rank {rank}", value, name, rank % ranks_per_node, ranks_per_node)
    return Topology(range(rank, rank + 1), world, ranks_per_node, *_meeting(environment, nodes))


def _of_task(started: Started, environment: Mapping[str, str], nodes: int, ranks_per_node: int) -> Topology:
    """Return the topology of a launcher's task: a node, or a rank."""
    world, by_srun = nodes * ranks_per_node, started.launcher is SRUN
    if started.count not in (world, nodes):
        raise UserError(
            f"{started.launcher.command} started {started.count} tasks, but the config asks for {nodes} nodes x "
            f"{ranks_per_node} ranks; start {nodes} tasks (one a node) or {world} (one a rank)"
        )
    on_node = 1 if started.count == nodes else ranks_per_node
    if by_srun:
        # Slurm names the node of a task, so any distribution (block, cyclic, plane) has consecutive ranks.
        node = _number(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else started.number // on_node
        local = started.number % on_node if started.local is None else started.local
        if node >= nodes or local >= on_node:
            raise UserError(
                f"srun started task {started.number} as number {local} of node {node} (SLURM_LOCALID, SLURM_NODEID), "
                f"but the config asks for {nodes} nodes x {ranks_per_node} ranks; start {started.count} tasks with "
                f"--nodes={nodes} --ntasks-per-node={on_node}"
            )
    else:
        node, local = divmod(started.number, on_node)
        if started.local is not None and started.local != local:
            _refuse_order(f"task {started.number}", started.local, started.source, local, on_node)
    first = node * ranks_per_node + local
    ranks = range(first, first + ranks_per_node // on_node)
    if by_srun:
        nodelist = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        # Two jobs on a node need different ports, and every task of a job must derive the same one. Linux assigns
        # ephemeral ports above these (net.ipv4.ip_local_port_range).
        port = FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % PORTS
        hosts = hosts_of(nodelist)
        return Topology(ranks, world, ranks_per_node, hosts[0], port, nodes=hosts)
    names = tuple(filter(None, environment.get(NODES, "").split(",")))
    return Topology(ranks, world, ranks_per_node, *_meeting(environment, nodes), nodes=names)


def _refuse_order(name: str, local: int, source: str, expected: int, on_node: int) -> NoReturn:
    raise UserError(
        f"{name} is number {local} on its node ({source}), where {expected} is expected: each node has {on_node}, "
        f"one after the other; start them that way (srun --distribution=block, mpirun --map-by ppr:{on_node}:node)"
    )


def _meeting(environment: Mapping[str, str], nodes: int) -> tuple[str, int]:
    """Return the address and port of the rendezvous from MASTER_ADDR and MASTER_PORT."""
    address = environment.get("MASTER_ADDR") or environment.get(POD_ADDRESS)
    if nodes > 1 and not address:
        raise UserError(f"train.nodes is {nodes}, but MASTER_ADDR, the host of rank 0, is not set; export it to all")
    name = "MASTER_PORT" if "MASTER_PORT" in environment else POD_PORT
    port = _number(environment, name) if name in environment else TORCH_PORT
    return address or "127.0.0.1", port


def gpu_of_rank(environment: MutableMapping[str, str], visible: int) -> int:
    """Return the number of this rank's GPU among the `visible` ones, and set LOCAL_RANK to it, as DeepSpeed and torch
    read it.

    A rank that sees a single GPU uses that: `srun --gpus-per-task=1` hides those of other ranks. Raises UserError if
    the GPUs are more than one, but fewer than the node's ranks, since they might be another rank's too.
    """
    local, ranks = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    if not visible or 1 < visible < ranks:
        raise UserError(
            f"hardware.device is cuda, but this machine shows {counted(visible, 'GPU')} to rank {environment['RANK']}, "
            f"one of {ranks} on its node; let it see all of the node's GPUs, or its own alone (srun --gpus-per-task=1)"
        )
    number = 0 if visible == 1 else local
    environment["LOCAL_RANK"] = str(number)
    return number


def hosts_of(nodelist: str) -> tuple[str, ...]:
    """Return the hosts of a Slurm node list in its order, as in node[03-04,9],x1 -> node03, node04, node9, x1."""
    part = r"(?:[^,\[\]\s]|\[[\w,-]+\])+"
    if not re.fullmatch(f"{part}(,{part})*", nodelist):
        raise UserError(f"SLURM_STEP_NODELIST is {shown(nodelist)}, which names no hosts; start the job again")
    return tuple(host for each in re.findall(part, nodelist) for host in _expanded(each))


def _expanded(part: str) -> list[str]:
    """Return the hosts of one part of a node list, with the ranges of its brackets expanded from left to right."""
    bracket = re.search(r"\[([^\]]*)\]", part)
    if not bracket:
        return [part]
    before, after = part[: bracket.start()], part[bracket.end() :]
    numbers: list[str] = []
    for each in bracket[1].split(","):
        first, _, last = each.partition("-")
        if last and first.isdecimal() and last.isdecimal():
            numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            numbers.append(each)
    return [before + number + rest for number in numbers for rest in _expanded(after)]
