"""What a training run is: what its losses depend on, and what makes two runs the very same."""

import hashlib
from pathlib import Path
from typing import Any

from zerolora.files import MANIFEST, canonical, read_json
from zerolora.fingerprint import of_stage
from zerolora.train.engines.base import precision_of

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


def resume_key(
    settings: dict[str, Any], config: dict[str, Any], data: Path, packing: Path, weights: Path
) -> dict[str, Any]:
    """Return what the losses depend on, but for rounding: settings by their config key, and hashes of the inputs.

    `settings` and `config` are those that training reads, `weights` is the file that says where the weights are.
    """
    found = {f"train.{key}": value for key, value in settings.items() if key not in FREE}
    rows = ("train.arrow", "validation.arrow")
    return {
        **found,
        "train.precision": precision_of(config),
        "train.gradient_clipping": config["gradient_clipping"],
        "model": _hash(read_json(weights, "zerolora weights")["files"]),
        "data": _hash({name: read_json(data / MANIFEST, "zerolora prepare")["files"][name] for name in rows}),
        "packing": _hash({name: read_json(packing / MANIFEST, "zerolora pack")["files"][name] for name in rows}),
    }


def run_fingerprint(settings: dict[str, Any], config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return what makes a finished run the very same, its speed and memory too."""
    trained = {key: value for key, value in settings.items() if key not in SAVING}
    return {"steps": steps, "settings": trained, "config": config, "code": of_stage("train")}


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()
