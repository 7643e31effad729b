"""PiSSA and OLoRA: the factors extracted from the base weights, the same ones whenever a run resumes.

A decomposition differs between machines, so rank 0 computes it once and saves it in the format of a checkpoint.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from zerolora.config.settings import TrainingPlan
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.methods.lora_init import first_factors, residual
from zerolora.methods.peft_format import PREFIX
from zerolora.train.checkpoint.format import (
    CorruptCheckpoint,
    OtherVersion,
    State,
    newest_first,
    path_of,
    read,
    read_chosen,
    write,
)
from zerolora.train.checkpoint.store import DAMAGED, EARLIER, Checkpoints, set_aside
from zerolora.train.engines.engine import Tensors
from zerolora.train.launch.rendezvous import broadcast_json

FOLDER = "start"
"""Beside a run's checkpoints."""


def extract(model: Any, plan: TrainingPlan, checkpoints: Checkpoints, sharded: bool, device: torch.device) -> Tensors:
    """Set the factors of peft's model to those that the run starts with, subtract their product from the base weights,
    and return them by their published names.

    `sharded`: by DeepSpeed. Collective. Raises UserError if another process trains the run, its starting factors are
    missing although it has checkpoints, or a rank cannot read the file.
    """
    folder = (checkpoints.folder if plan.resume in ("auto", "never") else Path(plan.resume).parent) / FOLDER
    path = path_of(folder, 0)
    first = torch.distributed.get_rank() == 0
    if first:
        checkpoints.claim()
    if broadcast_json(first and _is_missing(path, plan.resume), device):
        if first:
            LOGGER.info("decomposing the base weights for %s", plan.lora.init)
        result = _decomposed(model, plan.lora.init, sharded)
        if first:
            folder = checkpoints.folder / FOLDER
            state = State(step=0, parts={FOLDER: result}, updates=0, loop={}, seconds=0.0)
            write(folder, state, checkpoints.resume_key, checkpoints.run_fingerprint)
        path = path_of(checkpoints.folder / FOLDER, 0)
        torch.distributed.barrier()
    start = read_chosen(path, torch.distributed.get_rank()).parts[FOLDER]
    for name, layer in _layers(model):
        weight = layer.get_base_layer().weight
        with _gathered(weight, sharded, write=True):
            if weight.is_meta:
                continue
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            for part, factor in (("A", down), ("B", up)):
                factor.data = start[f"{name}.lora_{part}.weight"].to(factor.device, factor.dtype, copy=True)
            weight.data = residual(weight, down, up, layer.scaling["default"], layer.fan_in_fan_out)
    return start


def _is_missing(path: Path, resume: str) -> bool:
    """Return whether to compute the factors; set an unusable file aside. Raises UserError if needed ones are lost."""
    try:
        read(path)
    except OtherVersion:
        if resume != "never":
            raise
        set_aside(path, EARLIER)
        return True
    except CorruptCheckpoint as error:
        if resume != "never" and newest_first(path.parent.parent):
            raise UserError(
                f"{path}: {error}; the checkpoints beside it need these starting factors: restore the file, or set "
                "train.resume: never to start over"
            ) from None
        if path.exists():
            set_aside(path, DAMAGED)
        return True
    return False


def _decomposed(model: Any, init: str, sharded: bool) -> Tensors:
    """Return the factors by their published names, in the type of the trained ones; on rank 0 only."""
    result: Tensors = {}
    for name, layer in _layers(model):
        weight = layer.get_base_layer().weight
        with _gathered(weight, sharded):
            if torch.distributed.get_rank():
                continue
            whole = weight.T if layer.fan_in_fan_out else weight
            factors = first_factors(whole, layer.r["default"], layer.scaling["default"], init)
            for part, factor in zip("AB", factors, strict=True):
                parameter = getattr(layer, f"lora_{part}")["default"].weight
                result[f"{name}.lora_{part}.weight"] = factor.to(parameter.dtype).cpu().contiguous()
    return result


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the adapted modules with the prefix of their factors' published names."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield f"{PREFIX}{name}", module


def _gathered(weight: Any, sharded: bool, write: bool = False) -> AbstractContextManager[Any]:
    """Gather a weight; with `write`, rank 0's changes to it are kept."""
    if not sharded:
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        [weight], modifier_rank=0 if write else None
    )
    return context
