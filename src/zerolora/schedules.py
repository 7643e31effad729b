"""The number of steps of a run, and the learning-rate schedules of `train.schedule`; train/schedule.py computes them.

Names, options and defaults are those of transformers/optimization.py, without reduce_lr_on_plateau and greedy, which
depend on the loss; one_cycle is torch's OneCycleLR.
"""

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zerolora.errors import shown
from zerolora.units import counted

WARMUP_RATIO = 0.03
"""Default of train.warmup_ratio."""
ONE_CYCLE = "one_cycle"
CYCLE_RISE = 0.3
"""Default of pct_start in torch's OneCycleLR."""


def steps_in(rows: int, epochs: float, global_batch: int) -> int:
    """Return the number of global batches in so many passes over the rows, or parts of one; the last one may have
    fewer rows than the others."""
    return -(-rows_in(rows, epochs) // global_batch)


def rows_in(rows: int, epochs: float) -> int:
    """Return the number of rows in so many passes over them, or parts of one."""
    return int(rows * Fraction(str(epochs)))


RateScaling = Literal["none", "linear", "sqrt"]


def scaled_rate(rate: float, scaling: RateScaling | None, batch: int, reference: int | None) -> float:
    """Return the peak learning rate of a global batch, for a rate that is right for the `reference` batch: in
    proportion to the batch (arXiv 1706.02677) or to its square root (arXiv 1404.5997)."""
    if scaling in (None, "none") or reference is None:
        return rate
    ratio = batch / reference
    return rate * (ratio if scaling == "linear" else math.sqrt(ratio))


def every(interval: float, steps: int) -> int:
    """Return an interval in steps; below 1 it is a share of all steps."""
    return int(interval) if interval >= 1 else math.ceil(steps * Fraction(str(interval)))


Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Cycles = Annotated[float, Field(gt=0)]
Shape = Literal["linear", "cosine", "1-sqrt"]


class Schedule(BaseModel):
    """A schedule; its fields are its options."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def fault(cls, options: dict[str, Any], peak: float) -> str | None:
        """Return the mistake in options of the config with its remedy, None if they are valid."""
        try:
            schedule = cls.model_validate(options)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                if not cls.model_fields:
                    return f"{shown(key)}, but the schedule has no options; remove it"
                known = ", ".join(cls.model_fields)
                return f"{shown(key)} is not an option of the schedule; choose from {known}"
            if first["type"] == "missing":
                return f"has no {key}, which the schedule needs; set {{{key}: …}}"
            message = first["msg"].removeprefix("Input should be ")
            return f"{key}: {shown(first['input'])} is not valid; use {message}"
        return schedule.impossible(peak)

    def impossible(self, peak: float) -> str | None:
        """Return the mistake if options conflict, None otherwise."""
        return None

    def too_long(self, warmup: int, steps: int) -> str | None:
        """Return the mistake if an option needs more steps than a run has after warm-up, None otherwise."""
        return None


class Linear(Schedule):
    """Falls linearly to zero."""


class Constant(Schedule):
    """Stays at its peak."""


class Cosine(Schedule):
    """Falls to zero as a cosine."""

    num_cycles: Cycles = 0.5
    """Periods of the cosine; 0.5 falls once."""


class CosineWithRestarts(Schedule):
    """Falls to zero as a cosine, repeatedly."""

    num_cycles: Annotated[int, Field(ge=1)] = 1
    """Number of cycles."""


class Polynomial(Schedule):
    """Falls to lr_end as a power of the fraction of remaining steps."""

    lr_end: Annotated[float, Field(ge=0)] = 1e-7
    """Learning rate after the last step."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """The power; 1 is linear."""

    def impossible(self, peak: float) -> str | None:
        """Return the mistake if lr_end is not below the peak."""
        if self.lr_end < peak:
            return None
        return f"lr_end: {self.lr_end} is not below train.learning_rate, {peak}; use a lower one"


class InverseSqrt(Schedule):
    """Falls as the inverse square root of the step."""

    timescale: Annotated[int, Field(ge=1)] | None = None
    """Steps in which it falls to 1 / sqrt(2). Default: those of the warm-up, 10,000 without one."""


class CosineWithMinLr(Schedule):
    """Falls as a cosine to a minimum rate."""

    num_cycles: Cycles = 0.5
    """Periods of the cosine; 0.5 falls once."""
    min_lr: Annotated[float, Field(ge=0)] | None = None
    """The minimum rate."""
    min_lr_rate: Share | None = None
    """The minimum rate as a fraction of the peak, instead of min_lr."""

    def impossible(self, peak: float) -> str | None:
        """Return the mistake unless exactly one minimum rate is set."""
        if (self.min_lr is None) == (self.min_lr_rate is None):
            return "needs one of min_lr and min_lr_rate; set {min_lr_rate: 0.1}, for a tenth of the learning rate"
        return None


class CosineWarmupWithMinLr(CosineWithMinLr):
    """Like cosine_with_min_lr, one step ahead, with a warm-up that may start above 0."""

    warmup_lr_rate: Share | None = None
    """Fraction of the peak at which the warm-up starts. Default: 1 / steps of the warm-up."""


class WarmupStableDecay(Schedule):
    """Stays at its peak and falls in the last steps."""

    num_decay_steps: Count
    """Steps in which it falls."""
    num_stable_steps: Count | None = None
    """Steps at the peak. Default: all between warm-up and decay; with fewer, the run ends at the minimum rate."""
    warmup_type: Shape = "linear"
    """Shape of the warm-up."""
    decay_type: Shape = "cosine"
    """Shape of the decay."""
    min_lr_ratio: Share = 0.0
    """Fraction of the peak at which it starts and ends."""
    num_cycles: Cycles = 0.5
    """Waves of a cosine decay."""

    def too_long(self, warmup: int, steps: int) -> str | None:
        """Return the mistake if the decay would start before the peak."""
        left = steps - warmup
        if self.num_stable_steps is not None or self.num_decay_steps <= left:
            return None
        return (
            f"num_decay_steps: {self.num_decay_steps}, but {left} of {steps} steps are left after the warm-up; use "
            f"{left} or less"
        )


class OneCycle(Schedule):
    """Rises from a fraction of the peak to it, and falls to almost zero (torch's OneCycleLR, arXiv 1708.07120)."""

    pct_start: Share | None = None
    """Fraction of the steps in which it rises. Default: the warm-up, 0.3 without one."""
    anneal_strategy: Literal["cos", "linear"] = "cos"
    """Shape of each phase."""
    div_factor: Annotated[float, Field(ge=1)] = 25.0
    """The peak over the first rate."""
    final_div_factor: Annotated[float, Field(ge=1)] = 1e4
    """The first rate over the last one."""
    three_phase: bool = False
    """Fall to the first rate in as many steps as it rose, and only then to the last rate."""

    def impossible(self, peak: float) -> str | None:
        """Return the mistake if the second of three phases would not end."""
        return self._overlap(self.pct_start) if self.pct_start is not None else None

    def rise(self, warmup_steps: int | None, warmup_ratio: float | None, steps: int) -> float:
        """Return the fraction of the steps in which the rate rises."""
        if self.pct_start is not None:
            return self.pct_start
        if warmup_steps is None and warmup_ratio is None:
            return CYCLE_RISE
        return warmup_of(warmup_steps, warmup_ratio, steps) / steps

    def no_cycle(self, rise: float, steps: int) -> str | None:
        """Return the mistake if the rate would not rise, or three phases would overlap, None otherwise."""
        if rise * steps > 1:
            return self._overlap(rise)
        remedy = f"set {{pct_start: {math.ceil(200 / steps) / 100}}} or more" if steps > 1 else "use 2 steps or more"
        return f"one_cycle rises in {rise * steps:.3g} of {counted(steps, 'step')}, so it only falls; {remedy}"

    def _overlap(self, rise: float) -> str | None:
        if not self.three_phase or rise <= 0.5:
            return None
        return f"pct_start: {rise:.3g} with three_phase, which rises and falls in as many steps; use 0.5 or less"


def warmup_of(warmup_steps: int | None, warmup_ratio: float | None, steps: int) -> int:
    """Return the warm-up steps: warmup_steps, or ceil(warmup_ratio x steps), as in transformers."""
    if warmup_steps is not None:
        return warmup_steps
    return math.ceil((WARMUP_RATIO if warmup_ratio is None else warmup_ratio) * steps)


def too_short(
    schedule: str, options: dict[str, Any], warmup_steps: int | None, warmup_ratio: float | None, steps: int
) -> tuple[str, str] | None:
    """Return (key of `train`, message) if a run is too short for its warm-up, a decay from the peak or a cycle, None
    otherwise. `options` are valid."""
    warmup = warmup_of(warmup_steps, warmup_ratio, steps)
    if warmup > steps:
        return (
            "warmup_steps",
            (
                f"{warmup}, but the run has {counted(steps, 'step')}, so it never reaches its learning rate; use "
                f"{steps} or less"
            ),
        )
    chosen = SCHEDULES[schedule].model_validate(options)
    if isinstance(chosen, OneCycle):
        fault = chosen.no_cycle(chosen.rise(warmup_steps, warmup_ratio, steps), steps)
    else:
        fault = chosen.too_long(warmup, steps)
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
    ONE_CYCLE: OneCycle,
}
"""The schedules by name in transformers, and one_cycle. Here "constant" warms up like constant_with_warmup;
transformers' version has no warm-up, which is warmup_ratio 0."""
