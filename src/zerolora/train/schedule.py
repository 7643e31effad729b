"""The course of the learning rate."""

import math
from typing import Any


def learning_rate(settings: dict[str, Any], step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: linear warm-up, then cosine, linear or constant.

    As transformers.optimization: the rate reaches its peak after ceil(warmup_ratio x steps) steps and, but for
    "constant", zero after the last. Step 0 of the warm-up already has a rate above zero, so no step is idle.
    """
    warmup = math.ceil(settings["warmup_ratio"] * steps)
    if step < warmup:
        return settings["learning_rate"] * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    shape = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return settings["learning_rate"] * shape[settings["schedule"]]
