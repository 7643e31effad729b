"""ZeRO stage 2 with the optimizer on the host (arXiv 2101.06840)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero2_offload",
    order=60,
    sharded="as `zero2`, optimizer on the host",
    costs="as `zero2`, and copies to and from the host",
    stage=2,
    optimizer="cpu",
)
