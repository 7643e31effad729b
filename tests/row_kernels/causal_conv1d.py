"""causal-conv1d's functions with its arguments, in torch: the package itself needs a GPU."""

from typing import Any

import torch


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, seq_idx: Any = None, activation: str | None = None
) -> torch.Tensor:
    """Return the convolution of [1, channels, tokens] with [channels, size], within each run of equal `seq_idx`."""
    sizes = [x.shape[-1]] if seq_idx is None else torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    size, parts = weight.shape[-1], []
    for row in x.split(sizes, -1):
        part = torch.nn.functional.conv1d(row, weight.unsqueeze(1), bias, padding=size - 1, groups=len(weight))
        parts.append(part[..., : row.shape[-1]])
    whole = torch.cat(parts, -1)
    return torch.nn.functional.silu(whole) if activation in ("silu", "swish") else whole


def causal_conv1d_update(*_: Any, **__: Any) -> torch.Tensor:
    """Refuse: training makes no step with a state."""
    raise NotImplementedError
