"""ZeRO stage 3 with a second shard of the weights inside each node: hpZ (arXiv 2306.10209, 4.2)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero3_hpz",
    order=80,
    sharded="as `zero3`, and weights once more inside each node",
    costs="memory, but frozen weights do not cross the network",
    stage=3,
    within_node=True,
)
