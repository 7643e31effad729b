"""torch's FSDP2: everything is sharded among all ranks."""

from zerolora.strategies.fully_shard import FullyShard

STRATEGY = FullyShard(
    name="fsdp",
    order=130,
    sharded="everything (torch's FSDP2)",
    costs="a layer's weights twice a micro-step, embedding and head once",
    stage=3,
)
