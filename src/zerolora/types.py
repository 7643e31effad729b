"""Types shared by the whole package."""

from typing import Literal

Attention = Literal["eager", "sdpa", "flash"]
Loss = Literal["full", "supervised", "fused"]
Precision = Literal["fp32", "fp16", "bf16"]
EngineName = Literal["deepspeed", "ddp", "fsdp"]
Device = Literal["cpu", "cuda"]
Kernels = Literal["auto", "liger", "off"]
