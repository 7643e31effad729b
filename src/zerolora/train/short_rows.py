"""Causal attention of one short row on a CPU, by plain matrix products.

For rows of up to two hundred tokens in 16 bits, torch's fused kernel for CPUs is several times slower than the products
themselves; in fp32 it is about as fast (docs/training.md).
Like the kernel, this keeps no scores for the backward pass but recomputes them, a row at a time.
"""

from typing import Any

import torch

LONGEST = 192
"""Tokens of the longest row that is computed here. The scores of one head then take 192 x 192 x 4 bytes = 144 KiB,
which fits beside query, key and value into the L2 cache of a core (512 KiB or more on current server CPUs)."""


def takes(query: torch.Tensor, key: torch.Tensor, dropout: float, window: int | None) -> bool:
    """Tell whether these rows are computed here, [batch, heads, tokens, head size]."""
    tokens = query.shape[2]
    return (
        query.device.type == "cpu"
        and key.shape[2] == tokens <= LONGEST
        and not dropout
        and (window is None or tokens <= window)
    )


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Return causal attention, [batch, heads, tokens, head size] of queries; computed in fp32, as the kernel does.

    Key and value may have fewer heads, each of which serves as many queries' heads in a row.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = _Attention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    assert isinstance(attended, torch.Tensor)
    return attended


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling = scaling
        attended = _probabilities(_grouped(query, key), key.float(), scaling, query.shape[2]) @ value.float()
        return attended.view(*query.shape[:3], -1).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value = ctx.saved_tensors
        queries, keys, values = _grouped(query, key), key.float(), value.float()
        gradient = _grouped(gradient, key)
        probabilities = _probabilities(queries, keys, ctx.scaling, query.shape[2])
        of_value = probabilities.transpose(-1, -2) @ gradient
        of_scores = gradient @ values.transpose(-1, -2)
        of_scores = torch.ops.aten._softmax_backward_data(of_scores, probabilities, -1, torch.float32)
        of_query = (of_scores @ keys).mul_(ctx.scaling).view(query.shape)
        of_key = (of_scores.transpose(-1, -2) @ queries).mul_(ctx.scaling)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _grouped(queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return what has queries' heads by heads of keys, fp32: [batch, key heads, heads of each x tokens, head size]."""
    return queries.float().reshape(*key.shape[:2], -1, queries.shape[-1])


def _probabilities(queries: torch.Tensor, keys: torch.Tensor, scaling: float, tokens: int) -> torch.Tensor:
    """Return the attention of each query to each key: [batch, key heads, heads of each x tokens, tokens]."""
    scores = (queries @ keys.transpose(-1, -2)).mul_(scaling)
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)
    scores.view(*scores.shape[:2], -1, tokens, tokens).masked_fill_(later, float("-inf"))
    return scores.softmax(-1)
