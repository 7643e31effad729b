"""torch's FSDP2 with weights and optimizer on the host (CPUOffloadPolicy)."""

from zerolora.strategies.fully_shard import FullyShard

STRATEGY = FullyShard(
    name="fsdp_offload",
    order=150,
    sharded="as `fsdp`, weights and optimizer on the host",
    costs="as `fsdp`, the copies, and AdamW on the CPU",
    stage=3,
    optimizer="cpu",
    parameters="cpu",
)
