"""A training plan for tests that need one, but no config."""

from typing import Any

from zerolora.config.settings import TrainingPlan, UsefulFlops
from zerolora.planner.zero_json import ZeroJson

CHOICE: dict[str, Any] = {
    "device": "cpu",
    "engine": "ddp",
    "strategy": "ddp",
    "micro_batch": 1,
    "accumulation": 1,
    "activation_checkpointing": False,
    "attention": "eager",
    "precision": "fp32",
    "flops": UsefulFlops(token=1.0, squared_token=1.0, supervised_token=1.0, peak=None),
}


def training_plan(**settings: Any) -> TrainingPlan:
    """Return a plan with these settings, those of CHOICE, and the config's defaults."""
    return TrainingPlan(**{**CHOICE, **settings})


def zero_json(plan: TrainingPlan, stage: int) -> ZeroJson:
    """Return the zero.json of a plan under DeepSpeed, at this stage."""
    return ZeroJson(options={"gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}, choice=plan)
