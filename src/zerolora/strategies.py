"""The named strategies: what each shares out among the ranks, and what it moves to the host or to disk."""

from dataclasses import dataclass
from typing import Literal

Place = Literal["gpu", "cpu", "nvme"]


@dataclass(frozen=True)
class Strategy:
    """How model states are laid out.

    `engine` is what trains: DeepSpeed, torch's DistributedDataParallel, or its FullyShardedDataParallel (FSDP).
    """

    stage: int
    """What is shared out: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP counts as 3)."""
    engine: Literal["deepspeed", "ddp", "fsdp"] = "deepspeed"
    optimizer: Place = "gpu"
    """Where master and moments lie."""
    parameters: Place = "gpu"
    """Where a rank's share of the weights lies between its uses (stage 3 only)."""
    within_node: bool = False
    """Weights are gathered inside a node only: DeepSpeed's hpZ keeps a second share of them there for the backward
    pass (arXiv 2306.10209, 4.2), FSDP's hybrid shard shares out inside a node and repeats on every node."""
    quantized: bool = False
    """Weights are gathered as int8 with scales (qwZ, arXiv 2306.10209, 4.1), and in fp16 frozen ones are kept so."""


STRATEGIES = {
    "ddp": Strategy(0, engine="ddp"),
    "zero0": Strategy(0),
    "zero1": Strategy(1),
    "zero1_offload": Strategy(1, optimizer="cpu"),
    "zero2": Strategy(2),
    "zero2_offload": Strategy(2, optimizer="cpu"),
    "zero3": Strategy(3),
    "zero3_hpz": Strategy(3, within_node=True),
    "zero3_quantized": Strategy(3, quantized=True),
    "zero3_offload_optimizer": Strategy(3, optimizer="cpu"),
    "zero3_offload": Strategy(3, optimizer="cpu", parameters="cpu"),
    "zero3_nvme": Strategy(3, optimizer="nvme", parameters="nvme"),
    "fsdp": Strategy(3, engine="fsdp"),
    "fsdp_hybrid": Strategy(3, engine="fsdp", within_node=True),
}
