"""The learning rate of each step."""

from zerolora.config.settings import TrainSettings
from zerolora.errors import UserError
from zerolora.schedules import SCHEDULES, too_short, warmup_of


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: the warm-up, then the schedule (schedules.py)."""
    warmup = warmup_of(settings.warmup_steps, settings.warmup_ratio, steps)
    schedule, peak = SCHEDULES[settings.schedule].model_validate(settings.schedule_options), settings.learning_rate
    if step < warmup:
        return schedule.rising(step, warmup, peak)
    return peak * schedule.factor(step, warmup, steps, peak)


def check(settings: TrainSettings, steps: int) -> None:
    """Raise UserError if a run of so many steps is too short for its schedule."""
    fault = too_short(settings.schedule, settings.schedule_options, settings.warmup_steps, settings.warmup_ratio, steps)
    if fault:
        raise UserError(f"train.{fault[0]}: {fault[1]}")
