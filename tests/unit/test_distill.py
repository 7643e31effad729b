"""Distillation on its own: the divergence and its gradient against autograd in fp64, and a teacher's stored values."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerolora.train.head_loss import CROSS_ENTROPY
from zerolora.train.loss import ChunkedLoss, TrainedHeadLoss, of_logits
from zerolora.train.top_k import Divergence, TopK

TOKENS, HIDDEN, VOCABULARY = 600, 16, 53  # of which a chunk has 256 tokens
ALL = slice(None)


def stored(logits: torch.Tensor, targets: torch.Tensor, k: int, temperature: float) -> tuple[torch.Tensor, ...]:
    """Return what the stage stores of a teacher's logits: ids, log-probabilities in fp16, rest, label."""
    values = TopK(k, temperature, logits.shape[1])(logits.clone(), targets, ALL, False)
    return values[:k].T.int(), values[k : 2 * k].T.half(), values[-2], values[-1]


def divergence(teacher: tuple[torch.Tensor, ...], temperature: float, alpha: float) -> Divergence:
    ids, known, rest, _ = teacher
    return Divergence(ids, known, rest, temperature, alpha)


def expected(
    logits: torch.Tensor, targets: torch.Tensor, teacher: tuple[torch.Tensor, ...], temperature: float, alpha: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return loss, cross-entropy and divergence of each token as autograd computes them, in fp64."""
    ids, known, rest, _ = teacher
    target = torch.cat([known.double(), rest.double().unsqueeze(1)], 1).log_softmax(1)
    student = (logits / temperature).softmax(1)
    top = student.gather(1, ids.long())
    others = student.scatter(1, ids.long(), 0.0).sum(1, keepdim=True)
    bins = torch.cat([top, others], 1).log()
    kl = torch.where(target > -100, target.exp() * (target - bins), 0.0).sum(1)
    cross_entropy = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return alpha * cross_entropy + (1 - alpha) * temperature**2 * kl, cross_entropy, kl


def drawn(seed: int, scale: float = 3.0) -> tuple[torch.Tensor, ...]:
    """Return hidden states, a head's weight and bias, targets, and a teacher's logits."""
    draw = torch.Generator().manual_seed(seed)
    return (
        scale * torch.randn(TOKENS, HIDDEN, generator=draw),
        torch.randn(VOCABULARY, HIDDEN, generator=draw),
        torch.randn(VOCABULARY, generator=draw),
        torch.randint(VOCABULARY, (TOKENS,), generator=draw),
        scale * torch.randn(TOKENS, VOCABULARY, generator=draw),
    )


@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("temperature", "alpha", "k"), [(1.0, 0.5, 8), (2.5, 0.2, 8), (1.0, 0.0, VOCABULARY)])
def test_values_and_gradients_are_those_of_autograd_in_fp64(
    temperature: float, alpha: float, k: int, softcap: float | None, trained: bool
) -> None:
    """Chunk by chunk, with the weights that the loop gives each token's loss."""
    hidden, weight, bias, targets, of_teacher = drawn(0)
    teacher = stored(of_teacher, targets, k, temperature)
    each = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    doubles = [value.double().requires_grad_() for value in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*doubles)
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    wanted = expected(logits, targets, teacher, temperature, alpha)
    (wanted[0] * each).sum().backward()
    own = [hidden.requires_grad_(), weight.requires_grad_(trained), bias.requires_grad_(trained)]
    kind: Any = TrainedHeadLoss if trained else ChunkedLoss
    values = kind.apply(*own, targets, softcap, divergence(teacher, temperature, alpha))
    (values[0] * each).sum().backward()
    for value, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(value.double(), other.detach(), rtol=2e-5, atol=2e-5)
    for value, other in zip(own, doubles, strict=True):
        if value.requires_grad:
            assert value.grad is not None and other.grad is not None
            error = (value.grad.double() - other.grad).norm() / other.grad.norm()
            assert error < 4e-6


def test_the_whole_vocabulary_gives_the_full_divergence() -> None:
    """But for the rounding of log-probabilities to fp16. A teacher that is the student has none."""
    hidden, weight, bias, targets, of_teacher = drawn(2)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    teacher = stored(of_teacher, targets, VOCABULARY, 1.0)
    _, cross_entropy, kl = of_logits(logits, targets, divergence(teacher, 1.0, 0.5))
    log_target, log_input = of_teacher.double().log_softmax(1), logits.double().log_softmax(1)
    full = torch.nn.functional.kl_div(log_input, log_target, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(kl.double(), full, rtol=1e-3, atol=2e-3)
    assert abs(float(kl.double().mean() / full.mean()) - 1) < 1e-4
    torch.testing.assert_close(cross_entropy, of_logits(logits, targets, CROSS_ENTROPY)[0])
    torch.testing.assert_close(-teacher[3], torch.nn.functional.cross_entropy(of_teacher, targets, reduction="none"))
    for temperature, k in ((1.0, VOCABULARY), (1.0, 8), (3.0, 8)):
        same = divergence(stored(logits, targets, k, temperature), temperature, 0.0)
        _, _, none = of_logits(logits, targets, same)
        assert none.abs().max() < 2e-6


@given(seed=st.integers(0, 1000), k=st.integers(1, VOCABULARY), scale=st.sampled_from([0.1, 3.0, 40.0, 300.0]))
def test_it_is_finite_and_never_negative(seed: int, k: int, scale: float) -> None:
    """Also where the student, or the teacher, gives almost all of the mass to one token."""
    hidden, weight, bias, targets, of_teacher = drawn(seed, scale)
    logits = torch.nn.functional.linear(hidden, weight, bias)[:40].requires_grad_()
    teacher = stored(of_teacher[:40], targets[:40], k, 1.0)
    values = of_logits(logits, targets[:40], divergence(teacher, 1.0, 0.5))
    values[0].sum().backward()
    assert values.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    assert values[2].min() > -1e-5
