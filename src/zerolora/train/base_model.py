"""The base model, read from safetensors to where it computes: no rank holds the whole model on the host of a GPU."""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from zerolora.compat.bitsandbytes_patches import keep_layout
from zerolora.methods.registry import TRAINABLE
from zerolora.model.architecture import auto_class, config_of
from zerolora.planner.zero_json import ZeroJson
from zerolora.train import quantized
from zerolora.train.attention import IMPLEMENTATIONS, check_attention, no_attention
from zerolora.train.engines.engine import DTYPES, Engine, Loading
from zerolora.train.training_plan import TrainingPlan


def load(weights: Path, plan: TrainingPlan, config: ZeroJson, engine: type[Engine], device: torch.device) -> Any:
    """Return the base model of directory `weights`, as `engine` wants it loaded (Engine.loading).

    Whole, it lies on `device`: on a GPU each tensor is copied there as it is read, on CPU it stays mapped from the
    file, whose pages the ranks of a node share. Sharded, each rank keeps its part of every tensor (DeepSpeed's
    zero.Init). With first_rank, rank 0 reads, and the weights of other ranks are shapes. A quantized model is read
    whole by every rank. Raises UserError if the model has not the attention that the plan names.
    """
    check_attention(plan.attention, config_of(weights))
    loading = loading_of(plan, config, engine)
    quantization = quantized.config_of(plan, sharded=engine.loading(config) != "whole")
    attention = IMPLEMENTATIONS.get(plan.attention, plan.attention)
    dtype = DTYPES[plan.precision]
    sharding = sharded(plan, config, engine)
    try:
        if loading == "first_rank" and torch.distributed.get_rank():
            model = shapes(weights, dtype, attention)
        else:
            model = read(weights, dtype, attention, device if loading == "whole" else None, quantization)
    except ValueError as error:
        if _builds(weights, attention) or not _builds(weights, "eager"):
            raise
        raise no_attention(plan.attention, error) from None
    del sharding
    if quantization:
        keep_layout(model)
    return model


def loading_of(plan: TrainingPlan, config: ZeroJson, engine: type[Engine]) -> Loading:
    """Return how ranks read the base weights: as the engine wants it, but what is to be quantized whole."""
    return "whole" if TRAINABLE[plan.method].quantizes() else engine.loading(config)


def sharded(plan: TrainingPlan, config: ZeroJson, engine: type[Engine]) -> HfDeepSpeedConfig | None:
    """Return what makes transformers shard the weights that it reads, and peft gather those that it computes with, for
    as long as it is alive: both keep a weak reference. None if weights are not sharded while they are read."""
    return HfDeepSpeedConfig(config.options) if loading_of(plan, config, engine) == "sharded" else None


def read(
    weights: Path, dtype: torch.dtype, attention: str, device: torch.device | None = None, quantization: Any = None
) -> Any:
    """Return the model with its weights: on `device`, or where the engine shards them to.

    With `quantization`, of train/quantized.py, each linear module is quantized as it is read.

    With a GPU as device_map transformers materializes each tensor there by itself, from a slice of the mapped file
    (core_model_loading.py); on CPU parameters are the mapped file's own pages.
    """
    placed = device is not None and (device.type == "cuda" or quantization is not None)
    options: dict[str, Any] = {"device_map": {"": device}} if placed else {}
    if quantization is not None:
        options["quantization_config"] = quantization
    return auto_class(config_of(weights)).from_pretrained(
        weights,
        dtype=dtype,
        use_safetensors=True,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        **options,
    )


def shapes(weights: Path, dtype: torch.dtype, attention: str) -> Any:
    """Return the model without its weights; what it computes by itself, as rotary frequencies, is there."""
    config = config_of(weights)
    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(
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
