"""torch's DistributedDataParallel: every rank holds everything."""

from zerolora.strategies.data_parallel import DistributedDataParallel

STRATEGY = DistributedDataParallel(
    name="ddp",
    order=10,
    sharded="nothing (torch)",
    costs="gradients, once a step",
    stage=0,
)
