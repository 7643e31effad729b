"""Attention row by row with sinks, a score of each head that takes a share of the probability."""

import pytest
import torch
from test_isolation import CPU, build_loud, loss_and_gradients, rows, with_adapter

from zerolora.errors import UserError
from zerolora.train import attention_sinks
from zerolora.train.attention import each_row
from zerolora.train.isolation import check_isolation, check_length


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return query, key, value of [1, heads, tokens, head size], and sinks of [heads]."""
    torch.manual_seed(0)
    shapes = ((1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8), (4,))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def plain(inputs: list[torch.Tensor], window: int | None) -> torch.Tensor:
    """Return the attention as modeling_gpt_oss.py defines it, with the sink as one more column of the scores."""
    query, key, value, sinks = inputs
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    tokens = query.shape[2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window:
        seen = seen.triu(1 - window)
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    whole = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, tokens, 1)], -1).softmax(-1)
    return (whole[..., :-1] @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("tokens", [9, 300])
def test_attention_and_gradients_are_those_of_one_more_column(tokens: int, window: int | None) -> None:
    ours, theirs = inputs(tokens), inputs(tokens)
    query, key, value, sinks = ours
    attended, _ = each_row(torch.nn.Module(), query, key, value, None, sliding_window=window, s_aux=sinks)
    expected = plain(theirs, window)
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    (attended * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_the_kernel_of_many_lengths_has_the_shapes_of_a_gpu() -> None:
    """On shapes alone: without a GPU its values cannot be known."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        given = [torch.randn(shape, requires_grad=True) for shape in ((16, 4, 8), (16, 2, 8), (16, 2, 8), (4,))]
        query, key, value, sinks = given
        ends = torch.tensor([0, 7, 16], dtype=torch.int32)
        kernel = attention_sinks.of_many_lengths(ends, ends, 9, 1.0, -1)
        attended = attention_sinks.attend(query, key, value, sinks, kernel)
        attended.sum().backward()
        assert attended.shape == query.shape
        assert [each.grad is not None and each.grad.shape == each.shape for each in given] == [True] * 4


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_gpt_oss_packs_with_flash(precision: torch.dtype) -> None:
    model = build_loud("gpt_oss", "flash").to(precision)
    check_isolation(model, model.config, CPU)
    check_length(model, model.config, CPU, 50, packing=True)


def test_gpt_oss_has_the_loss_and_gradients_of_its_eager_attention() -> None:
    flash, eager = (with_adapter(build_loud("gpt_oss", attention)).eval() for attention in ("flash", "eager"))
    samples = rows(9, 14, 5, 21)
    ours = loss_and_gradients(flash, [[samples[:2], samples[2:]]], packing=True)
    theirs = loss_and_gradients(eager, [[[row]] for row in samples], packing=False)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for name, expected in theirs[2].items():
        torch.testing.assert_close(ours[2][name], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    assert all(gradient.any() for gradient in theirs[2].values())


def test_a_term_that_no_kernel_knows_is_refused() -> None:
    query, key, value, _ = inputs(9)
    for named in ({"position_bias": torch.zeros(9, 9)}, {"indices": torch.zeros(9)}, {"softcap": 50.0}):
        with pytest.raises(UserError, match=f"flash, which does not support the {next(iter(named))} of this model"):
            each_row(torch.nn.Module(), query, key, value, None, **named)
