"""The hardware as the cost model sees it: achievable rates of ranks, links and disks.

Rates in FLOP/s, bandwidths in bytes/s of one direction, latencies in seconds.
"""

from dataclasses import dataclass

KERNEL_SECONDS = 15e-6
"""Host time of one operation of a transformers model: an assumption; `probe` measures it. Decoding one token with a 7B
Llama takes about 25 ms on an A100 for about 1,500 operations; reading the weights takes only 7 ms of it."""


@dataclass(frozen=True)
class Link:
    """A link between GPUs, hosts or nodes."""

    name: str
    bandwidth: float
    """Bytes/s in one direction: of one GPU inside a node, of one node on a network."""
    latency: float
    """Seconds of one hop."""


@dataclass(frozen=True)
class Disk:
    """A local disk of a node, shared by its ranks."""

    name: str
    read: float
    """Bytes/s."""
    write: float
    """Bytes/s."""


@dataclass(frozen=True)
class HardwareRates:
    """Achievable rates of one rank while all other ranks are equally busy, and the number of ranks."""

    name: str
    rate: float
    """Matrix FLOP/s in the precision of training."""
    memory_bandwidth: float
    """Bytes/s read and written."""
    node: Link
    """Between the ranks of a node; per rank."""
    network: Link
    """Between nodes; per node."""
    host: Link
    """Between a GPU and its host; on CPU ranks a copy in memory."""
    disk: Disk
    cpu_adam: float
    """Parameters/s that Adam updates on the host."""
    kernel_seconds: float
    """Host time to issue one operation."""
    ranks_per_node: int
    nodes: int
    cpu: bool
    """Ranks compute on the CPU, where nothing overlaps with computation, and offload is a copy in memory."""

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.ranks_per_node * self.nodes
