"""The identity of a run: the inputs of its losses, and those of everything that it measures."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerolora.config.compared import compared
from zerolora.config.fingerprint import Chosen, of_stage
from zerolora.config.settings import TrainingPlan
from zerolora.files import MANIFEST, canonical, sha256
from zerolora.methods.registry import TRAINABLE
from zerolora.model import foreign
from zerolora.model.added_tokens import of_data
from zerolora.model.architecture import config_of, larger_class
from zerolora.model.manifest import located
from zerolora.model.read_spec import read_model_spec
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.earlier_adapter import provenance
from zerolora.train.objectives import OBJECTIVES

# Settings that change no loss beyond rounding: a run may resume with others. All other settings must stay the same.
FREE = frozenset(
    {
        "nodes",
        "ranks_per_node",
        "sequence_parallel",
        "micro_batch",
        "accumulation",
        "activation_checkpointing",
        "activation_offload",
        "attention",
        "kernels",
        "compile",
        "device",
        "engine",
        "strategy",
        "checkpoint_steps",
        "checkpoint_minutes",
        "resume",
        "tracker",
        "flops",
        "canary",
        "from_adapter",  # its content must stay the same
    }
)
ORDER = "all rows"
"""Of train/order.py; another one stops the resuming of runs that began with this one."""
# Settings that change no measurement either.
NOTHING: Mapping[str, Path] = {}
SAVING = frozenset({"checkpoint_steps", "checkpoint_minutes", "resume", "tracker", "canary"})


def resume_key(
    plan: TrainingPlan,
    config: ZeroJson,
    data: Path,
    packing: Path,
    weights: Path,
    tasks: Mapping[str, Path],
    beside: Mapping[str, Path] = NOTHING,
) -> dict[str, Any]:
    """Return everything that the losses depend on, except for rounding: settings by config key, and input hashes.

    Keys at their neutral value are omitted, so that a new key with its default voids no unfinished run. `config` holds
    the engine's options, `weights` is the file that locates the weights, `tasks` are the files of validation tasks,
    `beside` the directories with further columns of the rows, by the stage that wrote them.
    """
    settings = compared(plan)
    rows = ("train.arrow", "validation.arrow")
    origin, metrics = {}, list(OBJECTIVES[plan.objective].of(plan).metrics)
    if plan.from_adapter:
        result = provenance(Path(plan.from_adapter), TRAINABLE[plan.method])
        origin = {"adapter that training continues from": result["sha256"]}
    added = [asdict(token) for token in of_data(data)]
    larger = larger_class(config_of(located(weights)))
    return {
        **origin,
        "order of the rows": ORDER,
        **{f"train.{key}": value for key, value in settings.items() if key not in FREE},
        **{f"rows of validation task {name}": sha256(file) for name, file in tasks.items()},
        **({"added_tokens": _hash(added)} if added else {}),
        **({"class of the model": larger} if larger else {}),  # which names the tensors of checkpoints
        **({"experts": "quantized"} if _quantizes_experts(plan, located(weights)) else {}),  # earlier releases did not
        **({"set of metrics of train.objective": metrics} if metrics else {}),  # a checkpoint has those of every step
        "train.gradient_clipping": config.engine.gradient_clipping,
        "model": _hash(foreign.manifest(weights, "zerolora weights")["files"]),
        "data": _files(data, "zerolora stage prepare", rows),
        **{stage: _files(folder, f"zerolora stage {stage}", rows) for stage, folder in beside.items()},
        "packing": _files(packing, "zerolora stage pack", rows),
    }


def _quantizes_experts(plan: TrainingPlan, base: Path) -> bool:
    return TRAINABLE[plan.method].of(plan).unpacks_experts and bool(read_model_spec(base).experts)


def _files(directory: Path, command: str, names: tuple[str, ...]) -> str:
    files = foreign.manifest(directory / MANIFEST, command)["files"]
    return _hash({name: files[name] for name in names})


def run_fingerprint(plan: TrainingPlan, config: ZeroJson, steps: int) -> dict[str, Any]:
    """Return everything that a finished run's results depend on, speed and memory included."""
    settings = {key: value for key, value in compared(plan).items() if key not in SAVING}
    chosen: Chosen = {
        "methods": {plan.method},
        "optimizers": {plan.optimizer},
        "train.engines": {plan.engine},
        "train.objectives": {plan.objective},
        "evaluate.tasks": {
            task.check for task in plan.validation_tasks if task.max_new_tokens and not task.check_source
        },
    }
    return {"steps": steps, "settings": settings, "config": config.options, "code": of_stage("train", chosen)}


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()
