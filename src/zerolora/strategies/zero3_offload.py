"""ZeRO stage 3 with weights and optimizer on the host."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero3_offload",
    order=110,
    sharded="as `zero3`, weights and optimizer on the host",
    costs="all weights over PCIe at every micro-step",
    stage=3,
    optimizer="cpu",
    parameters="cpu",
)
