"""Types that commands, config and estimate share."""

from typing import Literal

Method = Literal["full", "lora", "dora", "ia3", "qlora"]
Attention = Literal["eager", "sdpa", "flash"]
Loss = Literal["full", "supervised", "fused"]
Precision = Literal["fp32", "fp16", "bf16"]
EngineName = Literal["deepspeed", "ddp", "fsdp"]
