"""Every schedule is transformers'; curves stay the same across versions."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_plan import training_plan
from transformers.trainer_utils import SchedulerType

from zerolora.errors import UserError
from zerolora.schedules import SCHEDULES
from zerolora.train.schedule import check, learning_rate

PEAK = 3e-4
DECAY = {"schedule": "warmup_stable_decay"}
STEPS = (0, 5, 6, 7, 45, 85, 99)
RATES = json.loads((Path(__file__).parent / "learning_rates.json").read_text())
"""Learning rates at STEPS of 100 with 7 warm-up steps, from transformers 5.23; linear warm-ups and those of
warmup_stable_decay are one step ahead, so that step 0 has a rate."""


@pytest.mark.parametrize("case", RATES, ids=str)
def test_rates_of_every_schedule_are_unchanged(case: dict[str, Any]) -> None:
    plan = training_plan(
        learning_rate=PEAK, schedule=case["schedule"], schedule_options=case["schedule_options"], warmup_steps=7
    )
    assert [learning_rate(plan, step, 100) for step in STEPS] == pytest.approx(case["rates"], rel=1e-12, abs=0)


@given(
    st.sampled_from(["cosine", "linear", "constant"]), st.integers(1, 500), st.floats(0, 0.99), st.floats(1e-6, 1e-1)
)
def test_curves_of_version_1_are_unchanged(name: str, steps: int, ratio: float, peak: float) -> None:
    """The formulas of version 1; transformers rounds a linear decay differently."""
    plan = training_plan(learning_rate=peak, schedule=name, warmup_ratio=ratio)
    warmup = math.ceil(ratio * steps)
    for step in range(steps):
        if step < warmup:
            expected = peak * (step + 1) / warmup
        else:
            progress = (step - warmup) / max(1, steps - warmup)
            factors = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
            expected = peak * factors[name]
        near = 1e-12 if name == "linear" and step >= warmup else 0.0
        assert learning_rate(plan, step, steps) == pytest.approx(expected, rel=near, abs=0.0)


def test_default_warm_up_is_3_percent() -> None:
    default, named = training_plan(learning_rate=1.0), training_plan(learning_rate=1.0, warmup_ratio=0.03)
    steps = training_plan(learning_rate=1.0, warmup_steps=3)
    for step in range(100):
        assert learning_rate(default, step, 100) == learning_rate(named, step, 100) == learning_rate(steps, step, 100)


def test_schedules_are_transformers_except_loss_driven_ones() -> None:
    assert {each.value for each in SchedulerType} - SCHEDULES.keys() == {"reduce_lr_on_plateau", "greedy"}
    assert SCHEDULES.keys() <= {each.value for each in SchedulerType}
    assert {case["schedule"] for case in RATES} == SCHEDULES.keys()


@pytest.mark.parametrize("warmup", [10, 15])
@pytest.mark.parametrize("case", RATES, ids=str)
def test_warm_up_of_all_steps_only_rises(case: dict[str, Any], warmup: int) -> None:
    plan = training_plan(
        learning_rate=PEAK, schedule=case["schedule"], schedule_options=case["schedule_options"], warmup_steps=warmup
    )
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
def test_schedule_longer_than_the_run_is_one_line(train: dict[str, Any], steps: int, said: str | None) -> None:
    plan = training_plan(learning_rate=PEAK, **train)
    if said is None:
        check(plan, steps)
        rates = [learning_rate(plan, step, steps) for step in range(steps)]
        assert max(rates) == pytest.approx(PEAK)
        # No jump: the decay starts at the peak.
        assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < PEAK / 2
        return
    with pytest.raises(UserError, match=said):
        check(plan, steps)
