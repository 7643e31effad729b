"""The learning-rate schedules that `train.schedule` may name, and their options: transformers' own that are functions
of the step alone (train/schedule.py computes them).

Names, options and defaults are those of transformers/optimization.py. reduce_lr_on_plateau and greedy follow the loss,
and are left out.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zerolora.errors import shown, wording
from zerolora.units import counted

WARMUP_RATIO = 0.03
"""Default of train.warmup_ratio."""

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Cycles = Annotated[float, Field(gt=0)]
Shape = Literal["linear", "cosine", "1-sqrt"]


class Schedule(BaseModel):
    """A schedule; its fields are its options, of which some have none."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def fault(cls, options: dict[str, Any], peak: float) -> str | None:
        """Return what is wrong with options of the config, and what to write instead; None if nothing is."""
        try:
            schedule = cls.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                if not cls.model_fields:
                    return wording(f"{shown(key)}, but the schedule has no options; remove it")
                known = ", ".join(cls.model_fields)
                return wording(f"{shown(key)} is not an option of the schedule; write some of {known}")
            if first["type"] == "missing":
                return wording(f"has no {key}, which the schedule needs; write {{{key}: …}}")
            message = first["msg"].removeprefix("Input should be ")
            return wording(f"{key}: {shown(first['input'])} is not valid; write {message}")
        return schedule.impossible(peak)

    def impossible(self, peak: float) -> str | None:
        """Return which options exclude each other, None if none do."""
        return None

    def too_long(self, warmup: int, steps: int) -> str | None:
        """Return which option takes more steps than a run has after its warm-up, None if none does."""
        return None


class Linear(Schedule):
    """Falls in a line to zero."""


class Constant(Schedule):
    """Stays at its peak."""


class Cosine(Schedule):
    """Falls to zero as a cosine."""

    num_cycles: Cycles = 0.5
    """Waves of the cosine: a half falls once."""


class CosineWithRestarts(Schedule):
    """Falls to zero as a cosine, several times."""

    num_cycles: Annotated[int, Field(ge=1)] = 1
    """How often it falls."""


class Polynomial(Schedule):
    """Falls to a rate as a power of the share of the steps that are left."""

    lr_end: Annotated[float, Field(ge=0)] = 1e-7
    """Learning rate after the last step."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """The power; 1 falls in a line."""

    def impossible(self, peak: float) -> str | None:
        """Return that lr_end is not below the peak."""
        if self.lr_end < peak:
            return None
        return wording(f"lr_end: {self.lr_end} is not below train.learning_rate, {peak}; write a lower one")


class InverseSqrt(Schedule):
    """Falls as one by the root of the step."""

    timescale: Annotated[int, Field(ge=1)] | None = None
    """Steps in which it falls to 1 / sqrt(2). Default: those of the warm-up, 10,000 without one."""


class CosineWithMinLr(Schedule):
    """Falls as a cosine to a lowest rate."""

    num_cycles: Cycles = 0.5
    """Waves of the cosine: a half falls once."""
    min_lr: Annotated[float, Field(ge=0)] | None = None
    """The lowest rate."""
    min_lr_rate: Share | None = None
    """The lowest rate as a share of the peak, instead."""

    def impossible(self, peak: float) -> str | None:
        """Return that there is not one lowest rate."""
        if (self.min_lr is None) == (self.min_lr_rate is None):
            return wording(
                "needs one of min_lr and min_lr_rate; write {min_lr_rate: 0.1}, for a tenth of the learning rate"
            )
        return None


class CosineWarmupWithMinLr(CosineWithMinLr):
    """As cosine_with_min_lr, a step ahead; its warm-up may begin at a rate."""

    warmup_lr_rate: Share | None = None
    """Share of the peak at which the warm-up begins. Default: one by the steps of the warm-up."""


class WarmupStableDecay(Schedule):
    """Stays at its peak, and falls in the last steps."""

    num_decay_steps: Count
    """Steps in which it falls."""
    num_stable_steps: Count | None = None
    """Steps at the peak. Default: all between warm-up and decay; with fewer, the lowest rate follows."""
    warmup_type: Shape = "linear"
    """Shape of the warm-up."""
    decay_type: Shape = "cosine"
    """Shape of the decay."""
    min_lr_ratio: Share = 0.0
    """Share of the peak at which it begins and ends."""
    num_cycles: Cycles = 0.5
    """Waves of a decay that is a cosine."""

    def too_long(self, warmup: int, steps: int) -> str | None:
        """Return that the decay would begin before the peak."""
        left = steps - warmup
        if self.num_stable_steps is not None or self.num_decay_steps <= left:
            return None
        return wording(
            f"num_decay_steps: {self.num_decay_steps}, but {left} of {steps} steps are left after the warm-up; write "
            f"{left} or less"
        )


def warmup_of(warmup_steps: int | None, warmup_ratio: float | None, steps: int) -> int:
    """Return the steps of the warm-up: warmup_steps, or ceil(warmup_ratio x steps), as in transformers."""
    if warmup_steps is not None:
        return warmup_steps
    return math.ceil((WARMUP_RATIO if warmup_ratio is None else warmup_ratio) * steps)


def too_short(
    schedule: str, options: dict[str, Any], warmup_steps: int | None, warmup_ratio: float | None, steps: int
) -> tuple[str, str] | None:
    """Return (key of `train`, message) if a run of so many steps is too short for its warm-up, or for a decay that
    begins at its learning rate; None if it is not. `options` are valid."""
    warmup = warmup_of(warmup_steps, warmup_ratio, steps)
    if warmup > steps:
        return (
            "warmup_steps",
            wording(
                f"{warmup}, but the run has {counted(steps, 'step')}, so it never reaches its learning rate; write "
                f"{steps} or less"
            ),
        )
    fault = SCHEDULES[schedule].model_validate(options).too_long(warmup, steps)
    return ("schedule_options", fault) if fault else None


SCHEDULES: dict[str, type[Schedule]] = {
    "cosine": Cosine,
    "linear": Linear,
    "constant": Constant,
    "constant_with_warmup": Constant,
    "cosine_with_restarts": CosineWithRestarts,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "cosine_with_min_lr": CosineWithMinLr,
    "cosine_warmup_with_min_lr": CosineWarmupWithMinLr,
    "warmup_stable_decay": WarmupStableDecay,
}
"""Every schedule by its name in transformers. "constant" warms up here, as constant_with_warmup does; transformers'
own has no warm-up, which is warmup_ratio 0."""
