"""The learning rate of each step."""

import functools
import itertools
import json
import math
from collections.abc import Callable

import torch

from zerolora.config.settings import TrainSettings
from zerolora.errors import UserError
from zerolora.files import canonical
from zerolora.schedules import ONE_CYCLE, OneCycle, too_short, warmup_of


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: the warm-up, then the schedule.

    It is transformers', except that the warm-up is one step earlier: step 0 has a rate above zero, so no step is
    wasted. cosine_warmup_with_min_lr begins above zero in transformers, too. one_cycle has its own rise.
    """
    if settings.schedule == ONE_CYCLE:
        return _one_cycle(settings, step, steps)
    warmup, peak = warmup_of(settings.warmup_steps, settings.warmup_ratio, steps), settings.learning_rate
    name = settings.schedule

    def factor(step: int) -> float:
        return _factor_of(name, canonical(settings.schedule_options), warmup, steps, peak)(step)

    if step < warmup and name == "warmup_stable_decay":
        return peak * (1.0 if step + 1 == warmup else factor(step + 1))
    if step < warmup and name != "cosine_warmup_with_min_lr":
        return peak * (step + 1) / warmup
    return peak * factor(step)


def _one_cycle(settings: TrainSettings, step: int, steps: int) -> float:
    """Return the rate of torch's OneCycleLR, by its arithmetic."""
    options = OneCycle.model_validate(settings.schedule_options)
    rise = options.rise(settings.warmup_steps, settings.warmup_ratio, steps)
    peak = settings.learning_rate
    first = peak / options.div_factor
    # (last step of a phase, rate there); a phase starts where the one before it ended.
    ends = [(float(rise * steps) - 1, peak), (steps - 1, first / options.final_div_factor)]
    if options.three_phase:
        ends.insert(1, (float(2 * rise * steps) - 2, first))
    for (start_step, start), (end_step, end) in itertools.pairwise([(0.0, first), *ends]):
        if step <= end_step:
            share = (step - start_step) / (end_step - start_step)
            if options.anneal_strategy == "linear":
                return (end - start) * share + start
            return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)
    raise AssertionError(f"step {step} of {steps}")


def check(settings: TrainSettings, steps: int) -> None:
    """Raise UserError if a run of `steps` steps is too short for its schedule."""
    fault = too_short(settings.schedule, settings.schedule_options, settings.warmup_steps, settings.warmup_ratio, steps)
    if fault:
        raise UserError(f"train.{fault[0]}: {fault[1]}")


@functools.lru_cache(maxsize=1)
def _factor_of(name: str, options: str, warmup: int, steps: int, peak: float) -> Callable[[int], float]:
    """Return transformers' factor of the learning rate as a function of the step. `options` is JSON."""
    from transformers.optimization import get_scheduler  # with peft, whose import rank.py orders

    chosen = {key: value for key, value in json.loads(options).items() if value is not None}
    # transformers' "constant" has no warm-up. Given both stable steps and all steps, it would read the first and warn.
    name = "constant_with_warmup" if name == "constant" else name
    total = None if "num_stable_steps" in chosen else steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    factor: Callable[[int], float] = get_scheduler(name, optimizer, warmup, total, chosen).lr_lambdas[0]
    return factor
