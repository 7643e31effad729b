"""torch's FSDP2 inside each node, with weights and optimizer on the host (CPUOffloadPolicy)."""

from zerolora.strategies.fully_shard import FullyShard

STRATEGY = FullyShard(
    name="fsdp_hybrid_offload",
    order=160,
    sharded="as `fsdp_hybrid`, weights and optimizer on the host",
    costs="as `fsdp_hybrid`, the copies, and AdamW on the CPU",
    stage=3,
    optimizer="cpu",
    parameters="cpu",
    within_node=True,
)
