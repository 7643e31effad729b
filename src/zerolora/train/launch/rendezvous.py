"""Where ranks meet: at a socket that their launcher holds, or at the address that their environment names."""

import datetime
import os

import torch.distributed

from zerolora.train.launch.launcher import LISTENER

PATIENCE = datetime.timedelta(minutes=30)  # as DeepSpeed's: other ranks wait while rank 0 reads a large model


def rendezvous(backend: str) -> None:
    """Join the ranks of this environment into one process group. Collective.

    Ranks of one launcher meet at its listening socket, which rank 0 has inherited: between the choice of a port and
    the first rank's start nobody else can take it. Other ranks meet as torch's `env://` does.
    """
    if LISTENER not in os.environ:
        torch.distributed.init_process_group(backend, timeout=PATIENCE)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    socket = None if rank else int(os.environ[LISTENER])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(*address, world, not rank, PATIENCE, master_listen_fd=socket)
    torch.distributed.init_process_group(backend, timeout=PATIENCE, store=store, rank=rank, world_size=world)
