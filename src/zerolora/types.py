"""Types shared by the whole package."""

from typing import Literal

Attention = Literal["eager", "sdpa", "flash"]
Loss = Literal["full", "supervised", "fused"]
Precision = Literal["fp32", "fp16", "bf16"]
EngineName = Literal["deepspeed", "ddp", "fsdp"]
Device = Literal["cpu", "cuda"]
Dequantize = Literal["on_fetch", "on_load"]
Kernels = Literal["auto", "liger", "off"]
RowKind = Literal["texts", "pairs", "labelled"]
"""What a row of data holds: a text to learn; a chosen and a rejected answer to a prompt; or an answer with a label."""
