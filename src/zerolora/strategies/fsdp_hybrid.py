"""torch's FSDP2 with a mesh: everything is sharded inside each node, and replicated on every node."""

from zerolora.strategies.fully_shard import FullyShard

STRATEGY = FullyShard(
    name="fsdp_hybrid",
    order=140,
    sharded="everything, inside each node only",
    costs="memory, but no weights cross the network",
    stage=3,
    within_node=True,
)
