"""zero3_whole_adapters: ZeRO stage 3 whose adapter weights stay gathered on every rank."""

from dataclasses import replace

from zerolora.strategies.deepspeed_zero import DeepSpeed
from zerolora.strategies.strategy import Buckets, ModelSizes, StepWork

LARGEST_RANK = 64


class WholeAdapters(DeepSpeed):
    """Stage 3 that gathers frozen weights only."""

    def buckets(self, model: ModelSizes, on_gpu: bool) -> Buckets:
        """Return stage 3's sizes, with factors of up to LARGEST_RANK below the threshold of sharding."""
        return replace(super().buckets(model, on_gpu), persistence=LARGEST_RANK * model.hidden)

    def gathered(self, work: StepWork) -> float:
        """Return the parameters that are gathered in one step: frozen ones."""
        return super().gathered(replace(work, trainable=0))


STRATEGY = WholeAdapters(
    name="zero3_whole_adapters",
    about="ZeRO stage 3 whose adapter weights stay gathered on every rank",
    sharded="as `zero3`, but for adapters of a rank up to 64",
    costs="as `zero3`, without gathering the adapters",
    stage=3,
)
