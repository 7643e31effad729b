"""The adapter: put on the base model, taken off it whole at any ZeRO stage, checked on disk."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, staged_directory, write_json

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def adapt(weights: Path, settings: dict[str, Any], zero: dict[str, Any]) -> Any:
    """Return the base model of directory `weights` with a fresh LoRA adapter; only the adapter is trainable.

    Under stage 3 each rank keeps its part of every weight while loading. Raises UserError if a target
    module is not in the model.
    """
    # Alive while the model loads, this makes from_pretrained partition as it reads (a weak reference is kept).
    partitioning = HfDeepSpeedConfig(zero) if zero["zero_optimization"]["stage"] == 3 else None
    try:
        model = AutoModelForCausalLM.from_pretrained(
            weights,
            dtype=_dtype(zero),
            use_safetensors=True,
            attn_implementation=settings["attention"],
            local_files_only=True,
        )
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        raise UserError(
            f"train.attention is {settings['attention']}, which this model does not have "
            f"({str(error).splitlines()[0]:.120}); write attention: eager"
        ) from None
    del partitioning
    model.config.use_cache = False
    if settings["activation_checkpointing"]:
        # Reentrant: the other kind compares shapes that stage 3 changes between the two passes.
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    torch.manual_seed(settings["seed"])  # the same adapter on every rank, at every stage
    return _with_lora(model, settings["lora"])


def save(engine: Any, directory: Path, rank: int, expected: dict[str, torch.Size]) -> None:
    """Write the adapter in peft's file format: fp32 tensors and a config with no path of this machine.

    Collective: at stage 3 every rank takes part in the gathering, rank 0 writes. What was written is read back and
    held against `expected` before it appears; raises UserError if it is not whole, finite and trained.
    """
    model = engine.module
    tensors = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if engine.zero_optimization_stage() == 3:
        import deepspeed

        gathering: Any = deepspeed.zero.GatheredParameters(list(tensors.values()))
    else:
        gathering = contextlib.nullcontext()
    with gathering:
        if rank == 0:
            state = {name: tensor.detach().float().cpu().clone() for name, tensor in tensors.items()}
    if rank == 0:
        adapter = get_peft_model_state_dict(model, state_dict=state)
        with staged_directory(directory) as staged:
            save_file(
                {name: tensor.contiguous() for name, tensor in adapter.items()},
                staged / WEIGHTS,
                {"format": "pt"},
            )
            _check(staged / WEIGHTS, expected)
            write_json(staged / CONFIG, _portable(model.peft_config["default"]))
            write_json(staged / MANIFEST, {"files": describe(staged)})


def expected_tensors(weights: Path, lora: dict[str, Any]) -> dict[str, torch.Size]:
    """Return name and shape of every tensor that an adapter on this base must have.

    Worked out from the base model's config.json and the LoRA settings alone, not from the engine that trained it:
    under ZeRO-3 that engine's own view can be empty.
    """
    with torch.device("meta"):
        model = _with_lora(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights)), lora)
    return {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}


def faults_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Size]) -> list[str]:
    """Return what is wrong with an adapter's tensors, one text a fault; empty if nothing is."""
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} does not belong there" for name in found if name not in expected]
    for name, tensor in found.items():
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


def _with_lora(model: Any, lora: dict[str, Any]) -> Any:
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora["r"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=lora["targets"],
        bias="none",
    )
    # peft warns of a missing cast on the meta device, where there is nothing to cast.
    logging.getLogger("peft").setLevel(logging.ERROR)
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        names = sorted(
            {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        )
        raise UserError(
            f"train.lora.targets {lora['targets']!r} does not fit the model ({str(error).splitlines()[0]:.120}); "
            f"write all-linear or some of {', '.join(names)}"
        ) from None


def _portable(config: LoraConfig) -> dict[str, Any]:
    """Return an adapter's config that is the same on every machine: sets sorted, no local path, no version."""
    value = {key: sorted(item) if isinstance(item, set) else item for key, item in config.to_dict().items()}
    value.update(base_model_name_or_path=None, inference_mode=True, revision=None)
    value.pop("peft_version", None)
    return {key: getattr(item, "value", item) for key, item in value.items()}


def _dtype(zero: dict[str, Any]) -> torch.dtype:
    for precision in ("bf16", "fp16"):
        if zero.get(precision, {}).get("enabled"):
            return DTYPES[precision]
    return torch.float32
