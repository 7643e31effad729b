"""ZeRO stage 2: optimizer states and gradients are sharded (arXiv 1910.02054, 5.2)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero2",
    order=50,
    sharded="optimizer states and gradients",
    costs="gradients at every micro-step, and updated weights",
    stage=2,
)
