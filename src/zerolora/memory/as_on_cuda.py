"""Operations of fake tensors of the host that allocate and save as CUDA's, where the CPU's differ."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class EfficientAttention(torch.autograd.Function):
    """Allocates and saves as CUDA's memory-efficient attention does.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a result [rows, heads, tokens, width of a value]."""
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return gradients in the shapes of query, key and value."""
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Compute as CUDA in the block: dropout with a mask of bytes, and fused attention also with dropout, or with values
    of another width than its keys."""
    functional = vars(torch.nn.functional)
    usual = {name: functional[name] for name in ("dropout", "scaled_dot_product_attention")}

    def dropout(value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(value, p, True)[0] if training and p > 0 else value

    def attention(query: Any, key: Any, value: Any, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        if value.shape[-1] != key.shape[-1]:
            efficient: Any = EfficientAttention.apply
            result: torch.Tensor = efficient(query, key, value)
        else:
            result = usual["scaled_dot_product_attention"](query, key, value, *args, **kwargs)
        return result

    functional |= {"dropout": dropout, "scaled_dot_product_attention": attention}
    try:
        yield
    finally:
        functional |= usual
