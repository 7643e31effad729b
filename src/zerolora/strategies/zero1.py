"""ZeRO stage 1: optimizer states are sharded (arXiv 1910.02054, 5.1)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero1",
    order=30,
    sharded="optimizer states",
    costs="as `zero0`, and updated weights",
    stage=1,
)
