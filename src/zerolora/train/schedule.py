"""The learning rate of each step."""

import math

from zerolora.config.settings import TrainSettings


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: linear warm-up, then cosine, linear or constant.

    As transformers.optimization: the rate reaches its peak after ceil(warmup_ratio x steps) steps and, but for
    "constant", zero after the last. Step 0 of the warm-up already has a rate above zero, so no step is wasted.
    """
    warmup = math.ceil(settings.warmup_ratio * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    factors = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
    return settings.learning_rate * factors[settings.schedule]
