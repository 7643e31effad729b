"""The strategies that `render.strategy` may name, one entry of a table each.

To add a strategy, add an entry (docs/extending.md). Nothing here imports torch, the memory model or the planner.
"""

from zerolora.registries import Registry, registered
from zerolora.strategies.deepspeed_zero import DeepSpeed
from zerolora.strategies.strategy import Strategy
from zerolora.strategies.torch_native import DistributedDataParallel, FullyShard

STRATEGIES: Registry[Strategy] = registered(
    "strategies",
    Strategy,
    [
        DistributedDataParallel(
            name="ddp",
            about="torch's DistributedDataParallel: every rank holds everything",
            sharded="nothing (torch)",
            costs="gradients, once a step",
            stage=0,
        ),
        DeepSpeed(
            name="zero0",
            about="ZeRO stage 0: every rank holds everything",
            sharded="nothing",
            costs="gradients, once a step",
            stage=0,
        ),
        DeepSpeed(
            name="zero1",
            about="ZeRO stage 1: optimizer states are sharded (arXiv 1910.02054, 5.1)",
            sharded="optimizer states",
            costs="as `zero0`, and updated weights",
            stage=1,
        ),
        DeepSpeed(
            name="zero1_offload",
            about="ZeRO stage 1 with the optimizer on the host (arXiv 2101.06840)",
            sharded="as `zero1`, optimizer on the host",
            costs="as `zero1`, and copies to and from the host",
            stage=1,
            optimizer="cpu",
        ),
        DeepSpeed(
            name="zero2",
            about="ZeRO stage 2: optimizer states and gradients are sharded (arXiv 1910.02054, 5.2)",
            sharded="optimizer states and gradients",
            costs="gradients at every micro-step, and updated weights",
            stage=2,
        ),
        DeepSpeed(
            name="zero2_offload",
            about="ZeRO stage 2 with the optimizer on the host (arXiv 2101.06840)",
            sharded="as `zero2`, optimizer on the host",
            costs="as `zero2`, and copies to and from the host",
            stage=2,
            optimizer="cpu",
        ),
        DeepSpeed(
            name="zero3",
            about="ZeRO stage 3: optimizer states, gradients and weights are sharded (arXiv 1910.02054, 5.3)",
            sharded="optimizer states, gradients and weights",
            costs="all weights, about twice a micro-step",
            stage=3,
        ),
        DeepSpeed(
            name="zero3_hpz",
            about="ZeRO stage 3 with a second shard of the weights inside each node: hpZ (arXiv 2306.10209, 4.2)",
            sharded="as `zero3`, and weights once more inside each node",
            costs="memory, but frozen weights do not cross the network",
            stage=3,
            within_node=True,
        ),
        DeepSpeed(
            name="zero3_quantized",
            about="ZeRO stage 3 with weights gathered as int8: qwZ (arXiv 2306.10209, 4.1)",
            sharded="as `zero3`, weights gathered as int8",
            costs="precision: never chosen by `auto`",
            stage=3,
            quantized=True,
            risk="weights are gathered as int8 (qwZ)",
        ),
        DeepSpeed(
            name="zero3_qgz",
            about="ZeRO stage 3 with gradients reduced as int4 between nodes: qgZ (arXiv 2306.10209, 4.3)",
            sharded="as `zero3`, gradients sent as int4 (several nodes, fp16)",
            costs="precision: never chosen by `auto`",
            stage=3,
            quantized_gradients=True,
            risk="gradients are reduced as int4 (qgZ)",
        ),
        DeepSpeed(
            name="zero3_offload_optimizer",
            about="ZeRO stage 3 with the optimizer on the host",
            sharded="as `zero3`, optimizer on the host",
            costs="as `zero3`, and copies to and from the host",
            stage=3,
            optimizer="cpu",
        ),
        DeepSpeed(
            name="zero3_offload",
            about="ZeRO stage 3 with weights and optimizer on the host",
            sharded="as `zero3`, weights and optimizer on the host",
            costs="all weights over PCIe at every micro-step",
            stage=3,
            optimizer="cpu",
            parameters="cpu",
        ),
        DeepSpeed(
            name="zero3_nvme",
            about="ZeRO stage 3 with weights and optimizer on disk (arXiv 2104.07857)",
            sharded="as `zero3`, weights and optimizer on disk (`hardware.nvme`)",
            costs="as `zero3_offload`, and the disk",
            stage=3,
            optimizer="nvme",
            parameters="nvme",
        ),
        FullyShard(
            name="fsdp",
            about="torch's FSDP2: everything is sharded among all ranks",
            sharded="everything (torch's FSDP2)",
            costs="a layer's weights twice a micro-step, embedding and head once",
            stage=3,
        ),
        FullyShard(
            name="fsdp_hybrid",
            about="torch's FSDP2 with a mesh: everything is sharded inside each node, and replicated on every node",
            sharded="everything, inside each node only",
            costs="memory, but no weights cross the network",
            stage=3,
            within_node=True,
        ),
        FullyShard(
            name="fsdp_offload",
            about="torch's FSDP2 with weights and optimizer on the host (CPUOffloadPolicy)",
            sharded="as `fsdp`, weights and optimizer on the host",
            costs="as `fsdp`, the copies, and AdamW on the CPU",
            stage=3,
            optimizer="cpu",
            parameters="cpu",
        ),
        FullyShard(
            name="fsdp_hybrid_offload",
            about="torch's FSDP2 inside each node, with weights and optimizer on the host (CPUOffloadPolicy)",
            sharded="as `fsdp_hybrid`, weights and optimizer on the host",
            costs="as `fsdp_hybrid`, the copies, and AdamW on the CPU",
            stage=3,
            optimizer="cpu",
            parameters="cpu",
            within_node=True,
        ),
    ],
)
"""All strategies by name, those that shard and move least first: `auto` takes the first of equally fast ones."""


def table() -> str:
    """Return the strategies as the table of docs/choice.md."""
    rows = (f"| `{each.name}` | {each.sharded} | {each.costs} |" for each in STRATEGIES.values())
    return "\n".join(["| strategy | sharded or offloaded | cost |", "|---|---|---|", *rows])
