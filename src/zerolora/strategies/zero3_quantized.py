"""ZeRO stage 3 with weights gathered as int8: qwZ (arXiv 2306.10209, 4.1)."""

from zerolora.strategies.deepspeed_zero import DeepSpeed

STRATEGY = DeepSpeed(
    name="zero3_quantized",
    order=90,
    sharded="as `zero3`, weights gathered as int8",
    costs="precision: never chosen by `auto`",
    stage=3,
    quantized=True,
    risk="weights are gathered as int8 (qwZ)",
)
