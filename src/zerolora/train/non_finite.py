"""The cause of a NaN or infinite loss: a weight of the base, of the initial adapter, or the range of the precision."""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from zerolora.errors import UserError
from zerolora.methods.peft_format import saved_name
from zerolora.model.weight_files import few
from zerolora.types import Precision

ADAPTER_NAME = re.compile(r"(?<!modules_to_save)\.default\b")
"""Matches names of parameters that peft added; a fully trained module starts as the base's."""
RANGE = {"fp16": "65,504"}
"""The largest number of types whose range is far smaller than fp32's."""


def check_finite(model: Any, precision: Precision, trained: bool = True) -> None:
    """Raise UserError if weights of a model are NaN or infinite; without `trained`, only frozen weights are checked.

    Collective: each rank checks its part of every weight. Trained weights are checked only before any update.
    """
    named = [(name, each) for name, each in model.named_parameters() if trained or not each.requires_grad]
    if not named:
        return
    flags = torch.tensor([any(map(_is_not_finite, _parts(each))) for _, each in named], dtype=torch.int32)
    flags = flags.to(named[0][1].device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    bad = [name for (name, _), flag in zip(named, flags.tolist(), strict=True) if flag]
    factors = {name for name, each in named if each.requires_grad and ADAPTER_NAME.search(name)}
    if of_base := [saved_name(name) for name in bad if name not in factors]:
        if precision in RANGE:
            raise UserError(
                f"{few(of_base)} of the base model: NaN or infinite in {precision}, whose largest number is "
                f"{RANGE[precision]}; set train.precision: bf16 or fp32, or fetch the model again"
            )
        raise UserError(
            f"{few(of_base)} of the base model: NaN or infinite in its files; fetch the model again, or another one"
        )
    if bad:
        raise UserError(
            f"{few(bad)} of the adapter: NaN or infinite before the first step; choose another train.from_adapter"
        )


def first_loss(loss: float, precision: Precision) -> UserError:
    """Return the error for a first loss that is not finite, though all frozen weights are."""
    remedy = f"set train.precision: {'bf16 or fp32' if precision in RANGE else 'fp32'}"
    return UserError(
        f"loss is {loss} at step 1, before any update, and all frozen weights are finite: activations leave the range "
        f"of {precision}; {remedy if precision != 'fp32' else 'train another base model'}"
    )


def _parts(parameter: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's numbers of a parameter; of a quantized one, its constants."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        yield from (each.absmax for each in (state, state.state2) if each is not None)
        if state.offset is not None:  # the mean of the constants, where they are quantized too
            yield torch.as_tensor(state.offset)
    elif hasattr(parameter, "ds_tensor"):  # DeepSpeed's stage 3
        yield parameter.ds_tensor.data
    elif hasattr(parameter, "to_local"):  # FSDP2
        yield parameter.to_local()
    else:
        yield parameter.data
    if (scales := getattr(parameter, "SCB", None)) is not None:
        yield scales


def _is_not_finite(part: torch.Tensor) -> bool:
    return part.is_floating_point() and not part.is_meta and not bool(torch.isfinite(part).all())
