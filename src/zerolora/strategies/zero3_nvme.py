"""ZeRO stage 3 with weights and optimizer on disk (arXiv 2104.07857)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero3_nvme",
    order=120,
    sharded="as `zero3`, weights and optimizer on disk (`hardware.nvme`)",
    costs="as `zero3_offload`, and the disk",
    stage=3,
    optimizer="nvme",
    parameters="nvme",
)
