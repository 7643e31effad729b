"""ZeRO stage 3 with the optimizer on the host."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero3_offload_optimizer",
    order=100,
    sharded="as `zero3`, optimizer on the host",
    costs="as `zero3`, and copies to and from the host",
    stage=3,
    optimizer="cpu",
)
