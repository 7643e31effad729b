"""ZeRO stage 3: optimizer states, gradients and weights are sharded (arXiv 1910.02054, 5.3)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero3",
    order=70,
    sharded="optimizer states, gradients and weights",
    costs="all weights, about twice a micro-step",
    stage=3,
)
