"""The rendezvous of ranks: at their launcher's socket, or at the address in their environment.

The store of torch.distributed and the collectives have no authentication: the network between the nodes of a job is
trusted, as torch and NCCL require. What this package writes to the store is signed (signed.py). No object is exchanged
by pickle, which could execute received code.
"""

import datetime
import json
import os
import socket
from typing import Any

import torch
import torch.distributed

from zerolora.errors import UserError, printable
from zerolora.train.launch.signed import signed, verified
from zerolora.train.launch.topology import LISTENER

TIMEOUT = datetime.timedelta(minutes=30)  # as DeepSpeed's: other ranks wait while rank 0 reads a large model


def rendezvous(backend: str) -> None:
    """Join the ranks of this environment into one process group. Collective.

    Ranks of one launcher use its listening socket, which rank 0 inherits, so no other process can take the port before
    they start. Other ranks use torch's `env://`.
    """
    if LISTENER not in os.environ:
        torch.distributed.init_process_group(backend, timeout=TIMEOUT)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = None if rank else int(os.environ[LISTENER])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(*address, world, not rank, TIMEOUT, master_listen_fd=listener)
    torch.distributed.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=world)


def check_own_gpu(device: torch.device) -> None:
    """Raise UserError if another rank uses this rank's GPU, which NCCL refuses. Collective."""
    gpu = f"{torch.cuda.get_device_properties(device).uuid} of {printable(socket.gethostname())}"
    store = torch.distributed.distributed_c10d._get_default_store()
    check_shared_by_none(store, torch.distributed.get_rank(), torch.distributed.get_world_size(), gpu)


def check_shared_by_none(store: torch.distributed.Store, rank: int, world: int, gpu: str) -> None:
    """Raise UserError if another rank names the same GPU. Collective."""
    keys = [f"gpu/{number}" for number in range(world)]
    store.set(keys[rank], signed(keys[rank], gpu))
    # Without a common secret nothing is known of the others' GPUs, of which heartbeat.py warns.
    found = zip(keys, store.multi_get(keys), strict=True)
    sharing = [number for number, (key, name) in enumerate(found) if verified(key, name) == gpu]
    if len(sharing) > 1:
        raise UserError(
            f"ranks {' and '.join(map(str, sharing))} use the same GPU ({gpu}), since each sees only that one; give "
            "each its own (srun --gpus-per-task=1), or let all see the node's GPUs (srun --gpus-per-node)"
        )


def broadcast_json(value: Any, device: torch.device) -> Any:
    """Return rank 0's `value`, a JSON value, on every rank. Collective; `device` is the backend's."""
    first = torch.distributed.get_rank() == 0
    text = json.dumps(value).encode() if first else b""
    size = torch.tensor([len(text)], device=device)
    torch.distributed.broadcast(size, 0)
    data = torch.tensor(list(text), dtype=torch.uint8) if first else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(device)
    torch.distributed.broadcast(data, 0)
    return json.loads(bytes(data.tolist()))
