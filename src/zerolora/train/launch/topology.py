"""The ranks that a process starts, and the rendezvous of all ranks, from its environment.

By itself a process starts all ranks of one machine; under `srun`, once a node or once a rank, those of its task; with
RANK set (torchrun, mpirun wrappers), that rank.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from zerolora.errors import UserError

FIRST_PORT, PORTS = 20_000, 12_000  # of Slurm jobs
LISTENER = "ZEROLORA_LISTENER"
"""The file descriptor of the listening socket for the rendezvous on one machine (rendezvous.py)."""
LAUNCHER = "ZEROLORA_LAUNCHER"
"""The launcher's process id; a rank with another parent has lost its launcher (stop_signals.py)."""


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
        } | ({LISTENER: str(self.listener.fileno())} if self.listener else {})


def topology(environment: Mapping[str, str], nodes: int, ranks_per_node: int) -> Topology:
    """Return this process's part of `nodes` x `ranks_per_node` ranks.

    Raises UserError if the environment has another number of processes than the config.
    """
    world = nodes * ranks_per_node
    if "RANK" in environment:
        if environment.get("WORLD_SIZE") != str(world):
            raise UserError(
                f"WORLD_SIZE is {environment.get('WORLD_SIZE')} but the config asks for {nodes} nodes x "
                f"{ranks_per_node} ranks; start {world} processes, or change train.nodes and ranks_per_node"
            )
        rank = int(environment["RANK"])
        address, port = environment.get("MASTER_ADDR", "127.0.0.1"), int(environment.get("MASTER_PORT", "29500"))
        return Topology(range(rank, rank + 1), world, ranks_per_node, address, port)
    # Only a step started by srun has a task id; a plain command in a job's script does not.
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _slurm_topology(environment, nodes, ranks_per_node)
    if nodes > 1:
        raise UserError(
            f"train.nodes is {nodes}, but this command was started once, on one machine; inside a Slurm job start "
            "it with srun, one task a node (profiles/slurm does so), or set train.nodes to 1"
        )
    return _own_topology(world)


def _own_topology(ranks: int) -> Topology:
    """Return the topology of a process that starts all ranks, on this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    return Topology(range(ranks), ranks, ranks, address, port, listener)


def _slurm_topology(environment: Mapping[str, str], nodes: int, ranks_per_node: int) -> Topology:
    world = nodes * ranks_per_node
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1")))
    task = int(environment["SLURM_PROCID"])
    if tasks == nodes == 1:
        return _own_topology(world)
    if tasks == world:
        ranks = range(task, task + 1)
    elif tasks == nodes:
        ranks = range(task * ranks_per_node, (task + 1) * ranks_per_node)
    else:
        raise UserError(
            f"srun started {tasks} tasks, but the config asks for {nodes} nodes x {ranks_per_node} ranks; "
            f"start {nodes} tasks (one a node) or {world} (one a rank)"
        )
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    # Two jobs on a node need different ports, and every task of a job must derive the same one. Linux assigns ephemeral
    # ports above these (net.ipv4.ip_local_port_range).
    port = FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % PORTS
    return Topology(ranks, world, ranks_per_node, first_host(hosts), port)


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list, as in node[03-05,9],x1 -> node03."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    if not match:
        raise UserError(f"SLURM_STEP_NODELIST is {nodelist!r}, which names no host; start the job again")
    return match[1] + (match[2] or "") + match[3]
