"""ZeRO stage 0: every rank holds everything."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero0",
    order=20,
    sharded="nothing",
    costs="gradients, once a step",
    stage=0,
)
