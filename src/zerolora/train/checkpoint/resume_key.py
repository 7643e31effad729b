"""Which runs are the same: what a run's losses depend on, and what makes two finished runs the very same."""

import hashlib
from pathlib import Path
from typing import Any

from zerolora.files import MANIFEST, canonical, read_json
from zerolora.fingerprint import of_stage
from zerolora.train.plan import TrainingPlan

# Settings of training that change no loss beyond rounding: a run may go on with others. All the rest binds.
FREE = frozenset(
    {
        "nodes",
        "ranks_per_node",
        "micro_batch",
        "accumulation",
        "activation_checkpointing",
        "attention",
        "device",
        "engine",
        "strategy",
        "checkpoint_steps",
        "checkpoint_minutes",
        "resume",
        "tracker",
        "flops",
    }
)
# Those that change nothing of what is trained or measured either.
SAVING = frozenset({"checkpoint_steps", "checkpoint_minutes", "resume", "tracker"})


def resume_key(plan: TrainingPlan, config: dict[str, Any], data: Path, packing: Path, weights: Path) -> dict[str, Any]:
    """Return what the losses depend on, but for rounding: settings by their config key, and hashes of the inputs.

    `config` holds the engine's options, `weights` is the file that says where the weights are.
    """
    settings = plan.model_dump(mode="json")
    rows = ("train.arrow", "validation.arrow")
    return {
        **{f"train.{key}": value for key, value in settings.items() if key not in FREE},
        "train.gradient_clipping": config["gradient_clipping"],
        "model": _hash(read_json(weights, "zerolora weights")["files"]),
        "data": _hash({name: read_json(data / MANIFEST, "zerolora prepare")["files"][name] for name in rows}),
        "packing": _hash({name: read_json(packing / MANIFEST, "zerolora pack")["files"][name] for name in rows}),
    }


def run_fingerprint(plan: TrainingPlan, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return what makes a finished run the very same, its speed and memory too."""
    settings = plan.model_dump(mode="json", exclude=set(SAVING))
    return {"steps": steps, "settings": settings, "config": config, "code": of_stage("train")}


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()
