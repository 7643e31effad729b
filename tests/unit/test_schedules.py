"""Every schedule is transformers'; curves stay the same across versions."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_plan import training_plan
from transformers.trainer_utils import SchedulerType

from zerolora.errors import UserError
from zerolora.schedules import SCHEDULES
from zerolora.train.schedule import check, learning_rate

PEAK = 3e-4
DECAY = {"schedule": "warmup_stable_decay"}
CYCLE = {"schedule": "one_cycle"}
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
    ours = SCHEDULES.keys() - {"one_cycle"}
    assert {each.value for each in SchedulerType} - ours == {"reduce_lr_on_plateau", "greedy"}
    assert ours <= {each.value for each in SchedulerType}
    assert {case["schedule"] for case in RATES} == ours


@pytest.mark.parametrize("steps", [7, 100, 333])
@pytest.mark.parametrize(
    ("train", "torchs"),
    [
        ({}, {}),
        ({"warmup_steps": 4}, {"pct_start": 4}),
        ({"warmup_ratio": 0.55}, {"pct_start": 0.55}),
        ({"schedule_options": {"pct_start": 0.37, "anneal_strategy": "linear"}}, {}),
        ({"schedule_options": {"pct_start": 1.0, "div_factor": 10.0, "final_div_factor": 1.0}}, {}),
        ({"schedule_options": {"three_phase": True, "div_factor": 3.0}}, {}),
        ({"schedule_options": {"three_phase": True, "pct_start": 0.5, "anneal_strategy": "linear"}}, {}),
    ],
    ids=str,
)
def test_one_cycle_is_torchs_at_every_step(train: dict[str, Any], torchs: dict[str, Any], steps: int) -> None:
    plan = training_plan(learning_rate=PEAK, schedule="one_cycle", **train)
    check(plan, steps)
    options = {**train.get("schedule_options", {}), **torchs}
    if torchs:  # torch has the warm-up as a share of the steps
        start = torchs["pct_start"]
        options["pct_start"] = (start if start >= 1 else math.ceil(start * steps)) / steps
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PEAK, total_steps=steps, cycle_momentum=False, **options
    )
    for step in range(steps):
        assert learning_rate(plan, step, steps) == theirs.get_last_lr()[0]
        optimizer.step()
        if step + 1 < steps:
            theirs.step()


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
        (CYCLE, 10, None),
        (CYCLE, 3, r"one_cycle rises in 0.9 of 3 steps, so it only falls; set {pct_start: 0.67} or more"),
        (CYCLE, 1, "one_cycle rises in 0.3 of 1 step, so it only falls; use 2 steps or more"),
        ({**CYCLE, "schedule_options": {"pct_start": 0.1}}, 10, "rises in 1 of 10 steps"),
        (
            {**CYCLE, "warmup_steps": 6, "schedule_options": {"three_phase": True}},
            10,
            "pct_start: 0.6 with three_phase, which rises and falls in as many steps; use 0.5 or less",
        ),
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
