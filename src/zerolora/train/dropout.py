"""Dropout on a CPU whose cost depends on how many values are dropped, not on how many there are.

torch draws a number for every value on a CPU and keeps them all, in the values' own type, for the backward pass. Here
the gaps between dropped values are drawn: those of independent draws of probability p are geometric. For the backward
pass only the positions of the dropped values are kept.
"""

from typing import Any

import torch

from zerolora.compat.peft_patches import replace_dropout


def make_sparse(model: torch.nn.Module) -> None:
    """Replace a model's dropout, which is that of the adapter's inputs, by one that draws gaps; in place."""
    replace_dropout(model, SparseDropout)


class SparseDropout(torch.nn.Dropout):
    """torch.nn.Dropout that draws gaps on a CPU."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, each zero with probability p and else divided by 1 - p."""
        if not self.training or not 0 < self.p < 1 or values.device.type != "cpu":
            return super().forward(values)
        dropped = _Dropped.apply(  # type: ignore[no-untyped-call]
            values, places(values.numel(), self.p), 1 / (1 - self.p)
        )
        assert isinstance(dropped, torch.Tensor)
        return dropped


def places(count: int, probability: float) -> torch.Tensor:
    """Return which of `count` values are dropped, each with this probability; ascending."""
    expected = count * probability
    drawn = int(expected + 6 * expected**0.5) + 16  # once in a thousand million times too few
    found = torch.empty(0, dtype=torch.int64)
    last = -1
    while last < count - 1:
        gaps = torch.empty(drawn, dtype=torch.float64).geometric_(probability)
        found = torch.cat([found, last + gaps.cumsum(0).long()])
        last = int(found[-1])
    return found[found < count]


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, dropped: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(dropped)
        ctx.scale = scale
        return _without(values, dropped, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (dropped,) = ctx.saved_tensors
        return _without(gradient, dropped, ctx.scale), None, None


def _without(values: torch.Tensor, dropped: torch.Tensor, scale: float) -> torch.Tensor:
    result = torch.empty(values.shape, dtype=values.dtype)
    torch.mul(values, scale, out=result)
    result.view(-1).index_fill_(0, dropped, 0)
    return result
