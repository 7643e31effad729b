"""ZeRO stage 1 with the optimizer on the host (arXiv 2101.06840)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero1_offload",
    order=40,
    sharded="as `zero1`, optimizer on the host",
    costs="as `zero1`, and copies to and from the host",
    stage=1,
    optimizer="cpu",
)
