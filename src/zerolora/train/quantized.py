"""The quantized base model of QLoRA, as transformers reads it through bitsandbytes."""

import importlib.util
from typing import Any

import torch

from zerolora.errors import UserError
from zerolora.methods.registry import TRAINABLE
from zerolora.train.engines.engine import DTYPES
from zerolora.train.training_plan import TrainingPlan


def config_of(plan: TrainingPlan, sharded: bool) -> Any:
    """Return how transformers is to quantize the base model; None if the method does not.

    `sharded` tells whether the engine shards the base model, which it does with floating-point types only. Raises
    UserError if bitsandbytes is not installed.
    """
    from transformers import BitsAndBytesConfig

    if not TRAINABLE[plan.method].quantizes():
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"train.method is {plan.method}, which needs the package bitsandbytes; install it, or write "
            f"{plan.method.removeprefix('q')}"
        )
    quantization = plan.quantization
    if quantization.type == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.type,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=DTYPES[plan.precision],
        bnb_4bit_quant_storage=_storage(plan, sharded),
    )


def _storage(plan: TrainingPlan, sharded: bool) -> torch.dtype:
    storage = plan.quantization.storage
    if storage != "auto":
        return {**DTYPES, "uint8": torch.uint8}[storage]
    return DTYPES[plan.precision] if sharded else torch.uint8
