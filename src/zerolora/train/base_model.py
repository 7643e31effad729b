"""The base model, read from safetensors to where it computes: no rank holds the whole model on the host of a GPU."""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from zerolora.errors import UserError
from zerolora.train.attention import IMPLEMENTATIONS
from zerolora.train.engines.base import DTYPES, Engine
from zerolora.train.plan import TrainingPlan


def load(weights: Path, plan: TrainingPlan, config: dict[str, Any], engine: type[Engine], device: torch.device) -> Any:
    """Return the base model of directory `weights`, as `engine` wants it loaded (Engine.loading).

    Whole, it lies on `device`: on a GPU each tensor is copied there as it is read, on CPU it stays mapped from the
    file, whose pages the ranks of a node share. Sharded, each rank keeps its part of every tensor (DeepSpeed's
    zero.Init). With first_rank, rank 0 reads, and the weights of other ranks are shapes. Raises UserError if the model
    has not the attention that the plan names.
    """
    loading = engine.loading(config)
    attention = IMPLEMENTATIONS.get(plan.attention, plan.attention)
    dtype = DTYPES[plan.precision]
    # Alive while the model loads, this makes from_pretrained shard what it reads (it keeps a weak reference).
    sharding = HfDeepSpeedConfig(config) if loading == "sharded" else None
    try:
        if loading == "first_rank" and torch.distributed.get_rank():
            model = shapes(weights, dtype, attention)
        else:
            model = read(weights, dtype, attention, device if loading == "whole" else None)
    except ValueError as error:
        if _builds(weights, attention) or not _builds(weights, "eager"):
            raise
        raise UserError(
            f"train.attention is {plan.attention}, which this model does not have "
            f"({str(error).splitlines()[0]:.120}); write attention: eager"
        ) from None
    del sharding
    if plan.attention == "flash" and not model._supports_attention_backend:
        raise UserError(
            f"train.attention is flash, but transformers' {type(model).__name__} has its attention built in; write "
            "attention: sdpa or eager"
        )
    return model


def read(weights: Path, dtype: torch.dtype, attention: str, device: torch.device | None = None) -> Any:
    """Return the model with its weights: on `device`, or where the engine shards them to.

    With a GPU as device_map transformers materializes each tensor there by itself, from a slice of the mapped file
    (core_model_loading.py); on CPU parameters are the mapped file's own pages.
    """
    on_gpu = device is not None and device.type == "cuda"
    return AutoModelForCausalLM.from_pretrained(
        weights,
        dtype=dtype,
        use_safetensors=True,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        **({"device_map": {"": device}} if on_gpu else {}),
    )


def shapes(weights: Path, dtype: torch.dtype, attention: str) -> Any:
    """Return the model without its weights; what it computes by itself, as rotary frequencies, is there."""
    config = AutoConfig.from_pretrained(weights, local_files_only=True, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    model.tie_weights()  # each had been replaced by an empty one of its own
    return model


def _builds(weights: Path, attention: str) -> bool:
    """Tell whether the model can be built with this attention; no weights are read."""
    try:
        shapes(weights, torch.float32, attention)
    except ValueError:
        return False
    return True
