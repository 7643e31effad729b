"""Rotary factors of each row by itself, where they depend on its length (model/rope.py)."""

import copy
import functools
from typing import Any

import torch

from zerolora.model import rope
from zerolora.train.attention import lengths
from zerolora.train.sequence_parallel import sequence


def compute_by_row(model: Any, longest: int) -> bool:
    """Make a model give each row of a batch the rotary factors of its own length; return whether that changes anything
    for rows of up to `longest` tokens."""
    modules = rope.growing(model, longest)
    for module in modules:
        if getattr(module.forward, "func", None) is not _by_row:
            module.forward = functools.partial(_by_row, copy.deepcopy(module))
    return bool(modules)


def _by_row(
    pristine: Any, x: torch.Tensor, position_ids: torch.Tensor, *layer: Any, **named: Any
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """Return cosines and sines, [packed rows, tokens, width], by the lengths of the batch's rows; in a forward pass
    that has set none, as in generation, those of the longest position, whatever passes came before."""
    rows, like = lengths.of_rows, x.new_empty(1, 1, 1)
    if rows is None or sum(rows[0]) != position_ids.shape[-1] * sequence.size:
        return _as_given(rope.factors(pristine, position_ids, like, *layer, **named))
    of_size = {
        size: rope.factors(pristine, torch.arange(size, device=position_ids.device)[None], like, *layer, **named)
        for size in {size for row in rows for size in row}
    }
    parts = range(len(next(iter(of_size.values()))))
    return _as_given(
        tuple(
            sequence.own_part(torch.cat([torch.cat([of_size[size][part] for size in row], 1) for row in rows]))
            for part in parts
        )
    )


def _as_given(factors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """Return factors as their module gives them: complex numbers are one tensor."""
    return factors[0] if len(factors) == 1 else factors
