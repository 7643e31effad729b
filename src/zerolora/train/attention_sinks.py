"""Attention with sinks: a learned score of each head that takes a share of the probability and adds nothing (gpt-oss).

With the log-sum-exp l of a token's scores and the sink s, probabilities shrink by exp(l) / (exp(l) + exp(s)), and so
does the attention. A fused kernel's backward pass computes the probabilities again from l; with the sink in it, they
and the gradients of query, key and value are those of the attention with its sink (arXiv 2307.08691, 3.1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """A fused attention without sinks."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Query, key, value -> the attention, and the log-sum-exp of each head and token in fp32."""
    backward: Callable[..., Tensors]
    """The attention's gradient, query, key, value, attention, log-sum-exp -> gradients of query, key and value."""
    heads_last: bool
    """The attention is [..., tokens, heads, head size], not [..., heads, tokens, head size]. The log-sum-exp is [...,
    heads, tokens]."""

    def of_attention(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return a number of each head and token in the attention's layout, with a last dimension of 1."""
        return (of_tokens.transpose(-1, -2) if self.heads_last else of_tokens).unsqueeze(-1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, kernel: Kernel
) -> torch.Tensor:
    """Return the attention of a kernel with sinks: [heads]."""
    attended = _WithSinks.apply(query, key, value, sinks, kernel)  # type: ignore[no-untyped-call]
    assert isinstance(attended, torch.Tensor)
    return attended


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, kernel: Kernel
    ) -> torch.Tensor:
        attended, sums = kernel.forward(query, key, value)
        whole = torch.logaddexp(sums, sinks.float().unsqueeze(-1))
        attended = (attended * kernel.of_attention(torch.exp(sums - whole))).to(attended.dtype)
        ctx.save_for_backward(query, key, value, sinks, attended, whole)
        ctx.kernel = kernel
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, attended, whole = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        of_sinks = None
        if ctx.needs_input_grad[3]:
            share = kernel.of_attention(torch.exp(sinks.float().unsqueeze(-1) - whole))
            each = (share * gradient.float() * attended.float()).sum(-1)
            heads = each.dim() - (1 if kernel.heads_last else 2)
            of_sinks = -each.sum([dimension for dimension in range(each.dim()) if dimension != heads]).to(sinks.dtype)
        return *kernel.backward(gradient, query, key, value, attended, whole), of_sinks, None


def on_cpu(scaling: float | None, mask: torch.Tensor | None) -> Kernel:
    """Return torch's kernel for CPUs, of rows of one length, [rows, heads, tokens, head size]; without a mask it is
    causal."""
    options = {"attn_mask": mask, "scale": scaling}
    aten = torch.ops.aten

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, **options
        )
        return attended, sums

    def backward(gradient: torch.Tensor, *saved: torch.Tensor) -> Tensors:
        of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *saved, 0.0, mask is None, **options
        )
        return of_query, of_key, of_value

    return Kernel(forward, backward, heads_last=False)


def of_many_lengths(
    ends: torch.Tensor, ends_of_keys: torch.Tensor, longest: int, scaling: float, window: int
) -> Kernel:
    """Return flash attention's kernel for rows of [tokens, heads, head size] with these boundaries, whose tokens
    see `window` before them, -1 for all (torch.nn.attention.varlen)."""
    import torch.nn.attention.varlen  # registers the operations

    operations, seen = torch.ops.torch_attn, [window, 0]
    lengths = (ends, ends_of_keys, longest, longest)

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = query.shape[1] != key.shape[1]
        attended, sums, _ = operations._varlen_attn(query, key, value, *lengths, window == -1, scaling, seen, grouped)
        return attended, sums

    def backward(gradient: torch.Tensor, *saved: torch.Tensor) -> Tensors:
        unused = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # the state of dropout
        of_query, of_key, of_value = operations._varlen_attn_backward(
            gradient, *saved, *lengths, window == -1, unused, scaling, seen
        )
        return of_query, of_key, of_value

    return Kernel(forward, backward, heads_last=True)
