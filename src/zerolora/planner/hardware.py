"""The rates of hardware for the cost model, and datasheets of GPUs, links and disks by name.

Rates in FLOP/s, bandwidths in bytes/s of one direction, latencies in seconds. The tables have nominal figures, of which
a training step reaches a share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from zerolora.errors import UserError, shown
from zerolora.machine.devices import BUILDS, of_wheel, runs_on
from zerolora.types import Precision
from zerolora.units import GIB

# Shares of the nominal figure to plan with.
LINK_SHARE = 0.80
"""Of a link: 80-85 % are reached (XTuner's DeepSpeed page; ml-engineering, network/README.md: 80-88 % measured)."""
PEER_SHARE = 0.64
"""Of PCIe between two GPUs, through the CPU: NCCL assumes 12 GB/s of 15.75, and on an Intel CPU a fifth more traffic
(NCCL, src/graph/topo.h, PCI_BW and INTEL_P2P_OVERHEAD)."""
MATMUL_SHARE = 0.70
"""Of a GPU's matrix rate. The best shape reaches 73-87 % (ml-engineering, compute/accelerator/README.md, table of
maximum achievable matmul FLOPS); a model's shapes are not the best."""
MEMORY_SHARE = 0.80
"""Of a GPU's memory bandwidth: about 80 % in a plain copy kernel (NVIDIA developer forum, zcopy thread)."""

HOST_ADAMW = 1.4e9
"""Parameters/s of torch's fused AdamW on one core, which a rank has (train/launch/launcher.py). Measured on an AMD EPYC
(benchmarks/results/train_host_optimizers.json)."""

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
    host_adamw: float
    """Parameters/s that a rank's AdamW updates on the host."""
    kernel_seconds: float
    """Host time to issue one operation."""
    ranks_per_node: int
    nodes: int
    cpu: bool
    """Ranks compute on the CPU, without overlap of computation; offload is a copy in memory."""

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.ranks_per_node * self.nodes


@dataclass(frozen=True)
class Gpu:
    """A GPU's datasheet."""

    name: str
    half: float
    """Dense 16-bit matrix FLOP/s, accumulated in fp32: half of a datasheet's sparse figure."""
    single: float
    """fp32 FLOP/s outside the matrix cores, which torch uses unless TF32 is enabled."""
    bandwidth: float
    """Memory bandwidth, bytes/s."""
    nominal: int
    """GiB in its name."""
    usable: float
    """GiB that torch reports: the lowest that has been published."""
    capability: float
    """CUDA compute capability; the matrix cores support bf16 from 8.0 on."""

    @property
    def memory(self) -> int:
        """Bytes that a process can have of its memory; the driver keeps the rest, with error correction most."""
        return int(self.usable * GIB)

    @property
    def supports_bf16(self) -> bool:
        """Whether its matrix cores compute in bf16."""
        return self.capability >= 8.0


def named(
    gpu: str,
    node_link: str,
    network: str,
    precision: Precision,
    ranks_per_node: int,
    nodes: int = 1,
    adapters: int = 1,
    host_link: str = "pcie4",
    disk: str = "nvme",
) -> HardwareRates:
    """Return the rates of named hardware: the nominal figures times the planning shares.

    `adapters`: network adapters that a node uses at once. Raises UserError for an unknown name, or bf16 on a GPU
    without it.
    """
    datasheet = known("GPU", gpu, GPUS)
    if precision == "bf16" and not datasheet.supports_bf16:
        raise UserError(
            f"precision is bf16, but {gpu} has compute capability {datasheet.capability}, and bf16 begins at 8.0; "
            "use fp16"
        )
    wire = known("network", network, NETWORKS)
    nominal = datasheet.single if precision == "fp32" else datasheet.half
    return HardwareRates(
        name=gpu,
        rate=nominal * MATMUL_SHARE,
        memory_bandwidth=datasheet.bandwidth * MEMORY_SHARE,
        node=_planned(known("node link", node_link, NODE_LINKS), PEER_SHARE if "pcie" in node_link else LINK_SHARE),
        network=_planned(Link(wire.name, wire.bandwidth * adapters, wire.latency), LINK_SHARE),
        host=known("host link", host_link, HOST_LINKS),
        disk=known("disk", disk, DISKS),
        host_adamw=HOST_ADAMW,
        kernel_seconds=KERNEL_SECONDS,
        ranks_per_node=ranks_per_node,
        nodes=nodes,
        cpu=False,
    )


def _planned(link: Link, share: float) -> Link:
    return Link(link.name, link.bandwidth * share, link.latency)


Entry = TypeVar("Entry", Gpu, Link, Disk)


def known(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return the entry of a name. Raises UserError, listing the names, for an unknown one."""
    if name not in table:
        raise UserError(f"{kind} {shown(name)} is not known; use one of {', '.join(offered(table))}")
    return table[name]


def offered(table: Mapping[str, Any]) -> list[str]:
    """Return the names of a table; of GPUs, those for which a torch of the locks has kernels (x86_64)."""
    wheels = [of_wheel(cuda, "x86_64") for cuda in BUILDS.values() if cuda]
    return [
        name
        for name, entry in table.items()
        if not isinstance(entry, Gpu) or any(runs_on(divmod(round(10 * entry.capability), 10), each) for each in wheels)
    ]


def _by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


# Sources: the named datasheets and white papers. NVIDIA's datasheets since Ampere print matrix rates with sparsity,
# halved here. `usable` is torch's, from out-of-memory errors and device properties in public threads: TransFusion#49
# (V100), CatVTON#133 (T4), CogVLM#236 (A10), bottlerocket#3873 and ultralytics#22877 (A100), Aria#24 (L4), Wan2.1#205
# (L40S), vllm#27508 (H100), VACE#56 (H100-NVL), pytorch/ao#4002 (B200), X-Portrait#7 (RTX-3090), sglang#12496
# (RTX-4090), ktransformers#1860 (RTX-5090), vllm#9630 (GH200), or somewhat less from logs in public repositories, where
# an A6000 had error correction on.
GPUS: dict[str, Gpu] = _by_name(
    [
        # NVIDIA V100 datasheet (SXM2)
        Gpu("V100-16GB", 125e12, 15.7e12, 900e9, 16, 15.75, 7.0),
        Gpu("V100-32GB", 125e12, 15.7e12, 900e9, 32, 31.73, 7.0),
        # NVIDIA T4 datasheet
        Gpu("T4", 65e12, 8.1e12, 320e9, 16, 14.56, 7.5),
        # NVIDIA A10 datasheet
        Gpu("A10", 125e12, 31.2e12, 600e9, 24, 21.99, 8.6),
        # NVIDIA A100 datasheet (40 GB and 80 GB editions)
        Gpu("A100-40GB-SXM", 312e12, 19.5e12, 1555e9, 40, 39.39, 8.0),
        Gpu("A100-40GB-PCIe", 312e12, 19.5e12, 1555e9, 40, 39.38, 8.0),
        Gpu("A100-80GB-SXM", 312e12, 19.5e12, 2039e9, 80, 79.13, 8.0),
        Gpu("A100-80GB-PCIe", 312e12, 19.5e12, 1935e9, 80, 79.15, 8.0),
        # NVIDIA RTX A6000 datasheet
        Gpu("A6000", 154.8e12, 38.7e12, 768e9, 48, 44.4, 8.6),
        # NVIDIA L4 datasheet
        Gpu("L4", 121e12, 30.3e12, 300e9, 24, 21.96, 8.9),
        # NVIDIA L40S datasheet
        Gpu("L40S", 362e12, 91.6e12, 864e9, 48, 44.39, 8.9),
        # NVIDIA H100 datasheet (NVL: one of its two GPUs)
        Gpu("H100-SXM", 989e12, 67e12, 3350e9, 80, 79.1, 9.0),
        Gpu("H100-PCIe", 756e12, 51e12, 2000e9, 80, 79.1, 9.0),
        Gpu("H100-NVL", 835e12, 60e12, 3900e9, 94, 93.0, 9.0),
        # NVIDIA H200 datasheet (SXM)
        Gpu("H200", 989e12, 67e12, 4800e9, 141, 139.7, 9.0),
        # NVIDIA DGX B200 datasheet, one of its eight GPUs
        Gpu("B200", 2250e12, 80e12, 8000e9, 180, 178.34, 10.0),
        # NVIDIA Ampere GA102, Ada and RTX Blackwell white papers: 16-bit with fp32 accumulation, half of the other rate
        Gpu("RTX-3090", 71e12, 35.6e12, 936e9, 24, 23.55, 8.6),
        Gpu("RTX-4090", 165.2e12, 82.6e12, 1008e9, 24, 23.49, 8.9),
        Gpu("RTX-5090", 209.5e12, 104.8e12, 1792e9, 32, 31.33, 12.0),
        # NVIDIA GH200 Grace Hopper Superchip datasheet, 96 GB edition
        Gpu("GH200", 989e12, 67e12, 4000e9, 96, 94.5, 9.0),
    ]
)

# Latencies of a hop: NCCL, src/graph/tuning.cc, hwLat, ring with the simple protocol.
_NVLINK_HOP, _PCIE_HOP, _RDMA_HOP = 3.4e-6, 5.7e-6, 14e-6
# Sockets through the kernel: an assumption; `probe` measures it.
_SOCKET_HOP = 50e-6

NODE_LINKS: dict[str, Link] = _by_name(
    [
        # PCI Express base specification: 16 lanes of 8, 16, 32 GT/s, 128b/130b encoding
        Link("pcie3", 15.75e9, _PCIE_HOP),
        Link("pcie4", 31.5e9, _PCIE_HOP),
        Link("pcie5", 63.0e9, _PCIE_HOP),
        # NVIDIA NVLink page, "total bandwidth" of both directions, halved: V100, A100, H100, B200
        Link("nvlink2", 150e9, _NVLINK_HOP),
        Link("nvlink3", 300e9, _NVLINK_HOP),
        Link("nvlink4", 450e9, _NVLINK_HOP),
        Link("nvlink5", 900e9, _NVLINK_HOP),
    ]
)
"""Nominal, one direction of one GPU."""

NETWORKS: dict[str, Link] = _by_name(
    [
        *(Link(f"{rate}gbe", rate * 1e9 / 8, _SOCKET_HOP) for rate in (1, 10, 25, 100, 200, 400)),
        # InfiniBand Trade Association roadmap: a port of four lanes of 50 and 100 Gb/s
        Link("infiniband-hdr", 200e9 / 8, _RDMA_HOP),
        Link("infiniband-ndr", 400e9 / 8, _RDMA_HOP),
    ]
)
"""Nominal, one direction of one adapter; a node with eight of them (a DGX has one a GPU) has `adapters` 8."""

HOST_LINKS: dict[str, Link] = _by_name(
    [Link(name, NODE_LINKS[name].bandwidth * LINK_SHARE, 1e-5) for name in ("pcie3", "pcie4", "pcie5")]
)
"""Effective, one direction, pinned memory."""

DISKS: dict[str, Disk] = _by_name(
    [
        # SATA revision 3: 6 Gb/s, 8b/10b encoding, less protocol
        Disk("sata-ssd", 0.55e9, 0.52e9),
        # Samsung 980 PRO datasheet, 1 TB: PCIe 4 x 4
        Disk("nvme", 7.0e9, 5.0e9),
        # Four of them, striped
        Disk("nvme-raid", 28.0e9, 20.0e9),
    ]
)
"""Sequential, of one node."""
