"""The engines that train an adapted model: DeepSpeed, torch's DistributedDataParallel (DDP) and fully_shard (FSDP2).

Under each the gradient of a step is the same: the sum, over ranks and micro-batches, of what `backward` was given,
divided by `divisor`. Compute is in the rendered precision; master weights, moments and clipping are fp32.
"""

from typing import Any

import torch

from zerolora.train.engines.base import Engine
from zerolora.train.engines.deepspeed import DeepSpeed, apply_startup_patches
from zerolora.train.engines.torch_engines import DDP, FSDP
from zerolora.train.launch.rendezvous import rendezvous


def connect(config: dict[str, Any], device: torch.device) -> None:
    """Make the ranks meet. Before the model loads: stage 3 shares it out while reading."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    rendezvous(backend)
    if "zero_optimization" in config:
        import deepspeed

        apply_startup_patches()
        deepspeed.init_distributed(dist_backend=backend, verbose=False)


def start(model: Any, config: dict[str, Any], settings: dict[str, Any], device: torch.device) -> Engine:
    """Return the engine of a rendered config, ready to train `model`. Collective."""
    engines = {"zero_optimization": DeepSpeed, "ddp": DDP, "fsdp": FSDP}
    kind = next(engines[section] for section in engines if section in config)
    return kind(model, config, settings, device)
