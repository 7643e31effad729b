"""The adapter: added to the base model, gathered whole from any engine, checked on disk."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from zerolora.config import schema
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.methods.lora import LoraMethod
from zerolora.train import base_model
from zerolora.train.dropout import make_sparse
from zerolora.train.engines import engine_class
from zerolora.train.engines.base import WEIGHT, Engine
from zerolora.train.loss import make_chunked
from zerolora.train.neftune import add_noise
from zerolora.train.plan import TrainingPlan

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def adapt(weights: Path, plan: TrainingPlan, config: dict[str, Any], device: torch.device) -> Any:
    """Return the base model of directory `weights` with a fresh LoRA adapter; only the adapter is trainable.

    `config` holds the engine's options. Raises UserError if the model lacks a target module or the attention that the
    plan names.
    """
    model = prepared(weights, plan, config, device)
    torch.manual_seed(plan.seed)  # the same adapter on every rank, at every stage
    model = LoraMethod.build(model, plan.lora)
    make_sparse(model)
    return model


def prepared(weights: Path, plan: TrainingPlan, config: dict[str, Any], device: torch.device) -> Any:
    """Return the base model ready for training: its loss, noise and activation checkpointing as the plan says. Where
    the weights go is the engine's choice (base_model.py)."""
    engine = engine_class(plan.engine)
    model = base_model.load(weights, plan, config, engine, device)
    model.config.use_cache = False
    make_chunked(model)
    if plan.neftune_alpha:
        add_noise(model, plan.neftune_alpha)
    if plan.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": engine.reentrant})
        if engine.reentrant:
            model.enable_input_require_grads()
    return model


def save(
    engine: Engine, directory: Path, rank: int, expected: dict[str, torch.Size], best: dict[str, torch.Tensor]
) -> None:
    """Write the adapter in peft's file format: fp32 tensors and a config with no path of this machine.

    That is `best`, if rank 0 has one, else the engine's current adapter. Collective: every rank takes part in the
    gathering, rank 0 writes. What was written is read back and compared with `expected` before it appears; raises
    UserError if it is not whole, finite and trained.
    """
    state = engine.part(WEIGHT)
    if rank == 0:
        state = best or state
        adapter = get_peft_model_state_dict(engine.module, state_dict=state)
        with staged_directory(directory) as staged:
            save_file(
                {name: tensor.contiguous() for name, tensor in adapter.items()},
                staged / WEIGHTS,
                {"format": "pt"},
            )
            _check(staged / WEIGHTS, expected)
            write_json(staged / CONFIG, _portable(engine.module.peft_config["default"]))
            write_json(staged / MANIFEST, {"files": describe(staged)})


def expected_tensors(weights: Path, lora: schema.Lora) -> dict[str, torch.Size]:
    """Return name and shape of every tensor that an adapter on this base must have.

    Computed from the base model's config.json and the LoRA settings alone, not from the engine that trained it: under
    ZeRO-3 the engine's own view can be empty (trl#4416, peft#2892).
    """
    config = AutoConfig.from_pretrained(weights, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = LoraMethod.build(AutoModelForCausalLM.from_config(config, trust_remote_code=False), lora)
    return {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}


def faults_of(adapter: dict[str, torch.Tensor], expected: dict[str, torch.Size]) -> list[str]:
    """Return what is wrong with an adapter's tensors, one text a fault; empty if nothing is."""
    faults = [f"{name} is missing" for name in expected if name not in adapter]
    faults += [f"{name} does not belong there" for name in adapter if name not in expected]
    for name, tensor in adapter.items():
        if name in expected and tensor.shape != expected[name]:
            faults.append(f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} is not finite")
        elif "lora_B" in name and not bool(tensor.any()):
            faults.append(f"{name} is all zero, so it was never trained")
    return faults


def _check(path: Path, expected: dict[str, torch.Size]) -> None:
    faults = faults_of(load_file(path), expected)
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise UserError(f"the adapter is not whole: {shown}; nothing was published")


def _portable(config: LoraConfig) -> dict[str, Any]:
    """Return an adapter's config that is the same on every machine: sets sorted, no local path, no version."""
    value = {key: sorted(item) if isinstance(item, set) else item for key, item in config.to_dict().items()}  # type: ignore[no-untyped-call]
    value.update(base_model_name_or_path=None, inference_mode=True, revision=None)
    value.pop("peft_version", None)
    return {key: getattr(item, "value", item) for key, item in value.items()}
