"""The adapter: put on the base model, taken off it whole under any engine, checked on disk."""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from zerolora.config import schema
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.methods.lora import LoraMethod
from zerolora.train.attention import IMPLEMENTATIONS
from zerolora.train.dropout import make_sparse
from zerolora.train.engines.base import WEIGHT, Engine, dtype_of
from zerolora.train.loss import make_chunked
from zerolora.train.neftune import add_noise

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def adapt(weights: Path, settings: dict[str, Any], config: dict[str, Any]) -> Any:
    """Return the base model of directory `weights` with a fresh LoRA adapter; only the adapter is trainable.

    Under stage 3 each rank keeps its part of every weight while loading; under FSDP only rank 0 reads, and the other
    ranks' base weights are shapes. Raises UserError if a target module is not in the model.
    """
    zero = config.get("zero_optimization", {})
    # Alive while the model loads, this makes from_pretrained partition as it reads (a weak reference is kept).
    partitioning = HfDeepSpeedConfig(config) if zero.get("stage") == 3 else None
    load = _shapes if "fsdp" in config and torch.distributed.get_rank() else _read
    try:
        model = load(weights, dtype_of(config), IMPLEMENTATIONS.get(settings["attention"], settings["attention"]))
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        raise UserError(
            f"train.attention is {settings['attention']}, which this model does not have "
            f"({str(error).splitlines()[0]:.120}); write attention: eager"
        ) from None
    del partitioning
    if settings["attention"] == "flash" and not model._supports_attention_backend:
        raise UserError(
            f"train.attention is flash, but transformers' {type(model).__name__} has its attention built in; write "
            "attention: sdpa or eager"
        )
    model.config.use_cache = False
    make_chunked(model)
    if settings["neftune_alpha"]:
        add_noise(model, settings["neftune_alpha"])
    if settings["activation_checkpointing"]:
        _checkpoint(model, reentrant="zero_optimization" in config)
    torch.manual_seed(settings["seed"])  # the same adapter on every rank, at every stage
    model = LoraMethod.build(model, schema.Lora.model_validate(settings["lora"]))
    make_sparse(model)
    return model


def save(
    engine: Engine, directory: Path, rank: int, expected: dict[str, torch.Size], best: dict[str, torch.Tensor]
) -> None:
    """Write the adapter in peft's file format: fp32 tensors and a config with no path of this machine.

    It is `best`, if rank 0 has one, else the engine's as it is now. Collective: every rank takes part in the gathering,
    rank 0 writes. What was written is read back and held against `expected` before it appears; raises UserError if it
    is not whole, finite and trained.
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


def expected_tensors(weights: Path, lora: dict[str, Any]) -> dict[str, torch.Size]:
    """Return name and shape of every tensor that an adapter on this base must have.

    Worked out from the base model's config.json and the LoRA settings alone, not from the engine that trained it:
    under ZeRO-3 that engine's own view can be empty.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights))
        model = LoraMethod.build(model, schema.Lora.model_validate(lora))
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


def _read(weights: Path, dtype: torch.dtype, implementation: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        weights, dtype=dtype, use_safetensors=True, attn_implementation=implementation, local_files_only=True
    )


def _shapes(weights: Path, dtype: torch.dtype, implementation: str) -> Any:
    """Return the model without its weights; what it works out by itself, as rotary frequencies, is there."""
    config = AutoConfig.from_pretrained(weights, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    model.tie_weights()  # each had been replaced by an empty one of its own
    return model


def _checkpoint(model: Any, reentrant: bool) -> None:
    # Stage 3 frees frozen weights inside the recomputation, where the other kind compares shapes (DeepSpeed#8148,
    # transformers#47254). DDP refuses the reentrant kind: a weight's gradient comes twice (pytorch#69060).
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


def _portable(config: LoraConfig) -> dict[str, Any]:
    """Return an adapter's config that is the same on every machine: sets sorted, no local path, no version."""
    value = {key: sorted(item) if isinstance(item, set) else item for key, item in config.to_dict().items()}
    value.update(base_model_name_or_path=None, inference_mode=True, revision=None)
    value.pop("peft_version", None)
    return {key: getattr(item, "value", item) for key, item in value.items()}
