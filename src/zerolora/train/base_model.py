"""The base model, read from safetensors to where it computes: no rank holds the whole model on the host of a GPU."""

import importlib.util
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import BitsAndBytesConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from zerolora.compat.bitsandbytes_patches import keep_layout
from zerolora.compat.transformers_patches import kept_as_read, quantize_all
from zerolora.config.method_sections import Quantization
from zerolora.config.settings import TrainingPlan
from zerolora.errors import UserError
from zerolora.machine.devices import on_gpu
from zerolora.methods.registry import TRAINABLE
from zerolora.model.architecture import auto_class, config_of, is_stacked, of_language_model
from zerolora.model.dequantized import check_quantizes
from zerolora.model.load_model import load_model
from zerolora.model.stored_quantization import check_trainable, stored_quantization
from zerolora.planner.zero_json import ZeroJson
from zerolora.train.attention import IMPLEMENTATIONS, check_attention, no_attention
from zerolora.train.engines.engine import DTYPES, Engine, Loading
from zerolora.train.quantized_experts import unpack_while_computing
from zerolora.types import Precision


def load(weights: Path, plan: TrainingPlan, config: ZeroJson, engine: type[Engine], device: torch.device) -> Any:
    """Return the base model of directory `weights`, loaded as `engine` needs it (Engine.loading).

    whole: on `device`. A GPU gets each tensor as it is read; on CPU the weights stay mapped from the file, and the
    ranks of a node share its pages. sharded: each rank has its part of every tensor (DeepSpeed's zero.Init).
    first_rank: rank 0 reads, and the weights of other ranks are only shapes. Of a model that is quantized to 4 bits and
    not read whole, every rank quantizes each weight as it is read, and keeps its part (Engine.keep).
    Raises UserError if the model does not have the plan's attention, or bitsandbytes is not installed.
    """
    check_attention(plan.attention, config_of(weights), rendered=True)
    loading = loading_of(plan, config, engine)
    stored = stored_quantization(weights)
    check_quantizes(weights, plan.method, TRAINABLE[plan.method].quantizes())
    check_trainable(stored, plan.method, TRAINABLE[plan.method].quantizes(), plan.quantization)
    quantization = quantization_config(plan, sharded=engine.loading(config) != "whole")
    attention = IMPLEMENTATIONS.get(plan.attention, plan.attention)
    dtype = DTYPES[plan.precision]
    sharding = None if quantization else sharded(plan, config, engine)
    try:
        if quantization and loading != "whole":
            with kept_as_read(engine.keep(config, plan, device), device, is_stacked):
                model = read(weights, dtype, attention, torch.device("cpu"), quantization)
            _move_buffers(model, device)
        elif loading == "first_rank" and torch.distributed.get_rank():
            model = shapes(weights, dtype, attention)
        else:
            model = read(weights, dtype, attention, device if loading == "whole" else None, quantization)
    except ValueError as error:
        if builds(weights, attention) or not builds(weights, "eager"):
            raise
        raise no_attention(plan.attention, error) from None
    del sharding
    return model


def loading_of(plan: TrainingPlan, config: ZeroJson, engine: type[Engine]) -> Loading:
    """Return how ranks read the base weights: as the engine needs it, unless all must be there to be adapted."""
    return "whole" if TRAINABLE[plan.method].of(plan).reads_whole else engine.loading(config)


def sharded(plan: TrainingPlan, config: ZeroJson, engine: type[Engine]) -> HfDeepSpeedConfig | None:
    """Return a config that, while it is alive, makes transformers shard the weights that it reads and peft gather those
    that it computes with: both keep a weak reference. None if weights are not sharded while they are read."""
    return HfDeepSpeedConfig(config.options) if loading_of(plan, config, engine) == "sharded" else None


def read(
    weights: Path,
    dtype: torch.dtype,
    attention: str,
    device: torch.device | None = None,
    quantization: Any = None,
    placed: Mapping[str, Any] | None = None,
) -> Any:
    """Return the model with its weights: on `device`, sharded by the engine, or where transformers puts it with the
    arguments `placed`. `quantization` is for transformers.

    With a GPU as device_map transformers materializes each tensor there itself, from a slice of the mapped file
    (core_model_loading.py); on CPU parameters are the mapped file's own pages.
    """
    whole = device is not None and (on_gpu(device) or quantization is not None)
    options: dict[str, Any] = dict(placed or ({"device_map": {"": device}} if whole else {}))
    config = config_of(weights)
    if quantization is not None:
        if stored_quantization(weights):
            # Its own config says how the run that made it computed.
            config.quantization_config = quantization.to_dict()
            options["config"] = config
        else:
            options["quantization_config"] = quantization
    with nullcontext() if quantization is None else quantize_all(is_stacked):
        named = of_language_model(config, attention)
        model = load_model(weights, dtype=dtype, attn_implementation=named, **options)
    if quantization is not None:
        keep_layout(model)
        unpack_while_computing(model)
    return model


def _move_buffers(model: Any, device: torch.device) -> None:
    """Move computed buffers, such as rotary frequencies, to `device`, in place."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def shapes(weights: Path, dtype: torch.dtype, attention: str) -> Any:
    """Return the model with shapes for weights, and with its computed buffers, such as rotary frequencies."""
    config = config_of(weights)
    with init_empty_weights(include_buffers=False):
        model = auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=of_language_model(config, attention),
            trust_remote_code=False,
        )
    model.tie_weights()  # each was replaced by its own empty one
    return model


def quantization_config(plan: TrainingPlan, sharded: bool) -> BitsAndBytesConfig | None:
    """Return how transformers quantizes the base model (QLoRA); None if the method does not.

    `sharded`: the engine shards the model, so storage is floating-point. Raises UserError without bitsandbytes.
    """
    if not TRAINABLE[plan.method].quantizes():
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"train.method is {plan.method}, which needs the package bitsandbytes; install it, or use "
            f"{plan.method.removeprefix('q')}"
        )
    return bitsandbytes_config(plan.quantization, plan.precision, sharded)


def bitsandbytes_config(quantization: Quantization, precision: Precision, sharded: bool) -> BitsAndBytesConfig:
    """Return how transformers quantizes a base model that computes in `precision`."""
    dtype = DTYPES[precision]
    if quantization.type == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    storage = {**DTYPES, "uint8": torch.uint8, "auto": dtype if sharded else torch.uint8}[quantization.storage]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )


def builds(weights: Path, attention: str) -> bool:
    """Return whether the model can be built with this attention, without reading weights."""
    try:
        shapes(weights, torch.float32, attention)
    except ValueError:
        return False
    return True
