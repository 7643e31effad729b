"""Every schedule is transformers' own, step by step; today's curves are what they have been."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_plan import training_plan
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

from zerolora.errors import UserError
from zerolora.schedules import SCHEDULES
from zerolora.train.schedule import check, learning_rate

PEAK = 3e-4
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"power": 2.0, "lr_end": 1e-5}],
    "inverse_sqrt": [{}, {"timescale": 50}],
    "cosine_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-5, "num_cycles": 1.0}],
    "cosine_warmup_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-5, "warmup_lr_rate": 0.2}],
    "warmup_stable_decay": [
        {"num_decay_steps": 20},
        {"num_decay_steps": 20, "num_stable_steps": 30, "min_lr_ratio": 0.1, "decay_type": "linear"},
        {"num_decay_steps": 20, "warmup_type": "cosine", "decay_type": "1-sqrt"},
        {"num_decay_steps": 20, "warmup_type": "1-sqrt", "num_cycles": 1.5},
    ],
}
DECAY = {"schedule": "warmup_stable_decay"}
CASES = [(name, options) for name in SCHEDULES for options in OPTIONS.get(name, [{}])]
OWN_START = ("cosine_warmup_with_min_lr",)  # whose warm-up begins above zero in transformers too


def theirs(name: str, options: dict[str, Any], warmup: int, steps: int) -> list[float]:
    """Return transformers' rates of all steps, and of one more; "constant" warms up, as its constant_with_warmup."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    name = "constant_with_warmup" if name == "constant" else name
    scheduler: Any = get_scheduler(name, optimizer, warmup, steps, options or None)
    return [PEAK * scheduler.lr_lambdas[0](step) for step in range(steps + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_step_of_every_curve_is_transformers(name: str, options: dict[str, Any], warmup: int) -> None:
    """But for the warm-up, whose rates come one step earlier, so that step 0 has one."""
    steps = 100
    plan = training_plan(learning_rate=PEAK, schedule=name, schedule_options=options, warmup_steps=warmup)
    expected = theirs(name, options, warmup, steps)
    if name not in OWN_START:
        expected = expected[1 : warmup + 1] + expected[warmup:]
    found = [learning_rate(plan, step, steps) for step in range(steps)]
    assert found == pytest.approx(expected[:steps], rel=1e-12, abs=1e-15)
    assert found[0] > 0


@given(
    st.sampled_from(["cosine", "linear", "constant"]), st.integers(1, 500), st.floats(0, 0.99), st.floats(1e-6, 1e-1)
)
def test_curves_of_before_are_bit_for_bit(name: str, steps: int, ratio: float, peak: float) -> None:
    """The formulas of version 1, as they stood."""
    plan = training_plan(learning_rate=peak, schedule=name, warmup_ratio=ratio)
    warmup = math.ceil(ratio * steps)
    for step in range(steps):
        if step < warmup:
            expected = peak * (step + 1) / warmup
        else:
            progress = (step - warmup) / max(1, steps - warmup)
            factors = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
            expected = peak * factors[name]
        assert learning_rate(plan, step, steps) == expected


def test_the_default_warm_up_is_three_hundredths() -> None:
    default, named = training_plan(learning_rate=1.0), training_plan(learning_rate=1.0, warmup_ratio=0.03)
    steps = training_plan(learning_rate=1.0, warmup_steps=3)
    for step in range(100):
        assert learning_rate(default, step, 100) == learning_rate(named, step, 100) == learning_rate(steps, step, 100)


def test_all_of_transformers_are_there_but_those_that_follow_the_loss() -> None:
    assert {each.value for each in SchedulerType} - SCHEDULES.keys() == {"reduce_lr_on_plateau", "greedy"}
    assert SCHEDULES.keys() <= {each.value for each in SchedulerType}


@pytest.mark.parametrize("warmup", [10, 15])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_warm_up_of_all_steps_or_more_only_rises(name: str, options: dict[str, Any], warmup: int) -> None:
    plan = training_plan(learning_rate=PEAK, schedule=name, schedule_options=options, warmup_steps=warmup)
    rates = [learning_rate(plan, step, 10) for step in range(10)]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("train", "steps", "said"),
    [
        ({"warmup_steps": 100}, 100, None),
        ({"warmup_steps": 101}, 100, "train.warmup_steps: 101, but the run has 100 steps"),
        ({"warmup_ratio": 0.9}, 3, None),
        ({**DECAY, "schedule_options": {"num_decay_steps": 97}}, 100, None),
        (
            {**DECAY, "schedule_options": {"num_decay_steps": 98}},
            100,
            "num_decay_steps: 98, but 97 of 100 steps are left",
        ),
        ({**DECAY, "schedule_options": {"num_decay_steps": 98, "num_stable_steps": 9}}, 100, None),
    ],
)
def test_a_schedule_that_a_run_is_too_short_for_is_one_line(
    train: dict[str, Any], steps: int, said: str | None
) -> None:
    plan = training_plan(learning_rate=PEAK, **train)
    if said is None:
        check(plan, steps)
        rates = [learning_rate(plan, step, steps) for step in range(steps)]
        assert max(rates) == pytest.approx(PEAK)
        # No jump: the decay begins at the peak.
        assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < PEAK / 2
        return
    with pytest.raises(UserError, match=said):
        check(plan, steps)
