"""Rotary embeddings whose factors depend on the length of the row, as LongRoPE's and dynamic NTK's.

transformers takes them from the longest position of a batch, so that a short row beside a long one has other logits
than alone. Whether a model has such a module is tried on the module itself.
"""

import bisect
import copy
from collections.abc import Sequence
from typing import Any

import torch

SHORT = 2
"""Tokens of a row that has the factors of short rows."""
EVER = 2**20
"""Tokens beyond any row."""


def grows(model: Any, length: int) -> bool:
    """Return whether a row of `length` tokens has other rotary factors than a short one."""
    return bool(growing(model, length))


def first_grown(model: Any, ascending: Sequence[int]) -> int:
    """Return the index of the first of `ascending` lengths at which factors have changed; their number if none has."""
    if not ascending or not grows(model, ascending[-1]):
        return len(ascending)
    return bisect.bisect_left(ascending, True, key=lambda length: grows(model, length))


def growing(model: Any, length: int) -> list[Any]:
    """Return the modules of a model whose factors depend on the length of rows of up to `length` tokens."""
    modules = [module for module in model.modules() if hasattr(module, "rope_type")]
    return [module for module in modules if length > SHORT and _grows(module, length)]


def factors(
    module: Any, positions: torch.Tensor, like: torch.Tensor, *layer: Any, **named: Any
) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines of `positions`, [rows, tokens], each [rows, tokens, width] in the type of `like`, as a
    module gives them that has seen no others; of one that gives complex numbers, as DeepSeek-V2's, those alone."""
    result: tuple[torch.Tensor, ...] | torch.Tensor = copy.deepcopy(module)(like, positions, *layer, **named)
    return (result,) if isinstance(result, torch.Tensor) else result


def _grows(module: Any, length: int) -> bool:
    short = torch.arange(SHORT, device="cpu")
    long, like = torch.cat([short, torch.tensor([length - 1], device="cpu")]), torch.zeros(1, 1, 1, device="cpu")
    kinds = module.rope_type if isinstance(module.rope_type, dict) else None
    for named in [{"layer_type": each} for each in kinds] if kinds else [{}]:
        try:
            with torch.device("cpu"):  # a model may be on the meta device, and its GPU need not wait
                new = type(module)(module.config)
            alone, beside = (factors(new, each[None], like, **named) for each in (short, long))
        except (TypeError, RuntimeError, IndexError):  # it takes other arguments, e.g. of images; training tests rows
            return False
        if any(not torch.equal(one, other[:, :SHORT]) for one, other in zip(alone, beside, strict=True)):
            return True
    return False
