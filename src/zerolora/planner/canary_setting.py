"""The canary: which runs compare their first losses with those of a safe setting, and which setting that is.

Settings count as risky if a strategy says so (Strategy.risk), if an option of DeepSpeed is known for wrong results
(strategies/deepspeed_zero.py, RISKY), or if a kernel is new.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zerolora.config.settings import RenderSettings
from zerolora.planner.candidates import Candidate, Choice, Planning, open_specs, predicted
from zerolora.planner.choice import distance
from zerolora.strategies import STRATEGIES
from zerolora.strategies.deepspeed_zero import RISKY, ZERO

STEPS = 5
"""Optimizer steps of each of the two short trainings, with train.canary: auto."""
LEAST_STEPS = 100
"""With auto, shorter runs are not compared: the canary makes ten steps and loads the model twice."""
VARLEN = "attention flash computes rows of many lengths in one kernel of its own (torch.nn.attention.varlen)"


def risks(choice: Choice, options: dict[str, Any], settings: RenderSettings) -> Iterator[str]:
    """Yield why the losses of a choice, rendered as `options`, are to be compared with those of a safe one."""
    strategy = STRATEGIES.get(choice.strategy)
    if strategy and strategy.risk:
        yield strategy.risk
    zero = options.get(ZERO, {})
    yield from (reason for key, reason in RISKY.items() if zero.get(key) is True)
    if choice.attention == "flash" and settings.device == "cuda" and settings.precision != "fp32":
        yield VARLEN


def due(settings: RenderSettings, steps: int) -> int:
    """Return the steps of the canary of a run of `steps` optimizer steps; 0 for none."""
    if settings.canary == "off" or (settings.canary == "auto" and steps < LEAST_STEPS):
        return 0
    return min(steps, STEPS if settings.canary == "auto" else settings.canary)


def safe_choice(planning: Planning) -> Choice | None:
    """Return the safe choice that fits and differs least from the settings, None if none fits."""
    settings = planning.settings
    free = {"strategy": "auto", "user_config": None, "micro_batch": None, "activation_checkpointing": None}
    other = Planning(
        planning.model,
        settings.model_copy(update={**free, "attention": None}),
        planning.rows,
        planning.hardware,
    )
    wanted = planning.user.strategy if planning.user else STRATEGIES.get(settings.strategy)
    fitting = [each for each in (predicted(other, spec) for spec in open_specs(other)) if _is_safe(each, settings)]
    nearest = min(fitting, key=lambda each: distance(each, wanted, settings), default=None)
    return _without_overlap(nearest.choice) if nearest else None


def _is_safe(candidate: Candidate, settings: RenderSettings) -> bool:
    return candidate.fault is None and not list(risks(_without_overlap(candidate.choice), {}, settings))


def _without_overlap(choice: Choice) -> Choice:
    return replace(choice, buckets=replace(choice.buckets, overlap=False))
