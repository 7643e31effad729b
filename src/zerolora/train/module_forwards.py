"""Changed forward passes of a model's modules: NEFTune's noise, dropout on a CPU, rows of added tokens."""

from typing import Any

import torch

from zerolora.compat.peft_patches import replace_dropout, replace_token_forward
from zerolora.train.attention import lengths


def add_noise(model: Any, alpha: float) -> None:
    """Add NEFTune's uniform noise (arXiv 2310.05914) to embedded tokens in training mode: in a row of L tokens of width
    d, up to alpha / sqrt(L d) for each number. In a packed row L is the row's own length, as if it were alone."""

    def hook(module: torch.nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        scale = alpha / (lengths.of_tokens(embedded) * embedded.shape[-1]).sqrt().unsqueeze(-1)
        return embedded + (2 * torch.rand_like(embedded) - 1) * scale.to(embedded.dtype)

    model.get_input_embeddings().register_forward_hook(hook)


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Set every probability of dropping in a model to 0, in place: those of its dropout modules, and those that its
    modules pass to functions, such as attention_dropout or layerdrop."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def make_sparse(model: torch.nn.Module) -> None:
    """Replace the adapter's dropout in a model by SparseDropout, in place."""
    replace_dropout(model, SparseDropout)


class SparseDropout(torch.nn.Dropout):
    """torch.nn.Dropout whose cost on a CPU depends on the number of dropped values, not of all.

    torch draws a number for each value on a CPU and keeps them all, in the values' type, for the backward pass. Here
    the gaps between dropped values are drawn, which are geometric, and only the dropped positions are kept.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, each zero with probability p and else divided by 1 - p."""
        if not self.training or not 0 < self.p < 1 or values.device.type != "cpu":
            return super().forward(values)
        dropped = _Dropped.apply(  # type: ignore[no-untyped-call]
            values, dropped_positions(values.numel(), self.p), 1 / (1 - self.p)
        )
        assert isinstance(dropped, torch.Tensor)
        return dropped


def dropped_positions(count: int, probability: float) -> torch.Tensor:
    """Return which of `count` values are dropped, each with this probability; ascending."""
    expected = count * probability
    drawn = int(expected + 6 * expected**0.5) + 16  # too few once in a thousand million times
    result = torch.empty(0, dtype=torch.int64)
    last = -1
    while last < count - 1:
        gaps = torch.empty(drawn, dtype=torch.float64).geometric_(probability)
        result = torch.cat([result, last + gaps.cumsum(0).long()])
        last = int(result[-1])
    return result[result < count]


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


def train_rows(model: Any) -> None:
    """Compute the trained rows of added tokens beside the frozen embedding and head, in place; loss.py has the head's
    part of the loss.

    In every forward pass peft writes the rows into a copy of the whole embedding and head, with gradients of that size
    (tuners/trainable_tokens/layer.py): gigabytes for a handful of rows. Here both compute with their own weights, in
    their own calls, for which stage 3 gathers them, and only added tokens use the rows.
    """
    replace_token_forward(model, _wrapper_forward, _embedding_forward)


def _wrapper_forward(wrapper: Any, *inputs: Any) -> torch.Tensor:
    layer = wrapper.token_adapter
    ((adapter, numbers),) = layer.token_indices.items()
    # Read in the wrapper's own call: stage 3 gathers it, and again for the wrapper's backward pass.
    rows = layer.trainable_tokens_delta[adapter]
    result: torch.Tensor = layer.base_layer(*inputs, numbers=torch.tensor(numbers, device=inputs[0].device), rows=rows)
    return result


def _embedding_forward(
    embedding: Any, ids: torch.Tensor, numbers: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    embedded: torch.Tensor = type(embedding).forward(embedding, ids)
    if numbers is None or rows is None:
        return embedded
    nearest = torch.searchsorted(numbers, ids).clamp_(max=len(numbers) - 1)
    own = torch.nn.functional.embedding(nearest, rows.to(embedded.dtype))
    scale = getattr(embedding, "embed_scale", None)  # of Gemma's, whose forward multiplies by it
    if scale is not None:
        own = own * torch.as_tensor(scale, dtype=own.dtype, device=own.device)
    return torch.where((numbers[nearest] == ids).unsqueeze(-1), own, embedded)
