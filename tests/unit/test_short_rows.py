"""Attention of short rows by matmul equals torch's fused kernel."""

import functools
from collections.abc import Callable

import pytest
import torch

from zerolora.train import attention


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize(("heads", "key_heads", "tokens"), [(4, 4, 7), (6, 2, 33), (3, 1, 1), (9, 3, 192)])
def test_values_and_gradients_match_the_fused_kernel(
    heads: int, key_heads: int, tokens: int, scaling: float | None, precision: torch.dtype
) -> None:
    torch.manual_seed(0)
    # Strided as in a model: views of tensors with tokens first.
    inputs = [torch.randn(2, tokens, each, 16).to(precision).transpose(1, 2) for each in (heads, key_heads, key_heads)]
    gradient = torch.randn(2, heads, tokens, 16).to(precision)
    assert attention.is_short(inputs[0], inputs[1], 0.0, None)

    def done(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in inputs]
        attended = attend(*leaves)
        attended.backward(gradient)
        return [attended.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )

    actual = done(functools.partial(attention.attend_short, scaling=scaling))
    expected = done(fused)
    assert len(actual) == len(expected) == 4
    tolerance = 2e-2 if precision == torch.bfloat16 else 2e-5
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def test_other_inputs_use_the_kernel() -> None:
    long = torch.zeros(1, 2, attention.LONGEST_SHORT + 1, 4)
    short = long[:, :, :10]
    assert attention.is_short(short, short, 0.0, 10)
    assert not attention.is_short(long, long, 0.0, None)
    assert not attention.is_short(short, short, 0.1, None)
    assert not attention.is_short(short, short, 0.0, 9)
    assert not attention.is_short(short, long, 0.0, None)
