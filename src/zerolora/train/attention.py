"""Attention that computes every row of a packed row on its own: no mask, no score of two rows, no padding attended to.

transformers keeps packed rows apart by a mask of [tokens, tokens], and computes all scores that the mask then hides.
Here the fused kernels get one row at a time: on CUDA all of them in one call (torch.nn.attention.varlen), elsewhere one
call each. Rows padded on the right need no mask either, as no token sees what comes after it.
"""

import functools
import inspect
import itertools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from zerolora.errors import UserError, wording
from zerolora.model.architecture import model_class, takes_own_attention
from zerolora.train import short_rows
from zerolora.train.sequence_parallel import sequence

# As transformers knows it; a name with "flash" in it would make it look for the flash-attn package.
NAME = "each_row"
IMPLEMENTATIONS = {"flash": NAME}
"""Names of attention in the config that are others in transformers."""
HALF = (torch.float16, torch.bfloat16)
VARLEN_HEAD = 256  # the largest head size of flash attention's kernels
VARLEN_STEP = 8  # of the head sizes that they take
VARLEN_CAPABILITY = (8, 0)
REFUSED = ("softcap", "s_aux", "position_bias")  # of a model that adds something to its scores


def no_attention(name: str, error: ValueError) -> UserError:
    """Return the error of a model that transformers does not build with an attention of the config."""
    return UserError(
        f"train.attention is {name}, which this model does not have ({str(error).splitlines()[0]:.120}); write "
        "attention: eager"
    )


def check_attention(name: str, config: Any) -> None:
    """Raise UserError if an attention of the config cannot replace that of a model's class.

    Some classes would end with a KeyError while they are built, others would keep an attention of their own.
    """
    model = model_class(config)
    if name == "flash" and not takes_own_attention(model):
        masked = model._supports_attention_backend
        why = wording("needs a mask for its attention" if masked else "has its attention built in")
        others = "sdpa or eager" if model._supports_sdpa else "eager"
        raise UserError(
            f"train.attention is flash, but transformers' {model.__name__} {why}; write attention: {others}"
        )


class Lengths:
    """The rows of the batch that is being computed. A model has no argument for them, so they are set here: for the
    forward pass, and for the backward pass, which may compute a layer again."""

    def __init__(self) -> None:
        self.of_rows: list[list[int]] | None = None
        self._ends: torch.Tensor | None = None

    def set(self, of_rows: list[list[int]] | None) -> None:
        """Set the lengths of the rows in each packed row, padding as one more; None if a packed row is one row."""
        self.of_rows, self._ends = of_rows, None

    def ends(self, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Return where rows begin and end among all tokens of the batch: [rows + 1], int32."""
        if self._ends is None:
            of_rows = self.of_rows or [[tokens]] * batch
            found = [0, *itertools.chain.from_iterable(of_rows)]
            self._ends = torch.tensor(found, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        return self._ends

    def of_tokens(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the length of the row that each token is in, fp32: [batch, tokens] of `embedded`'s."""
        batch, tokens = len(embedded), embedded.shape[1] * sequence.size
        found = [length for row in self.of_rows or [[tokens]] * batch for length in row for _ in range(length)]
        of_tokens = torch.tensor(found, dtype=torch.float32, device=embedded.device).view(batch, tokens)
        part: torch.Tensor = sequence.own_part(of_tokens)
        return part

    def longest(self, tokens: int) -> int:
        """Return the tokens of the longest row."""
        return max(max(lengths) for lengths in self.of_rows) if self.of_rows else tokens


lengths = Lengths()


def each_row(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention of each row: [batch, heads, tokens, head size] -> [batch, tokens, heads, head size].

    As transformers calls an implementation of attention (integrations/sdpa_attention.py). Raises UserError if the model
    adds to its scores what the kernels do not know.
    """
    assert attention_mask is None
    if found := [name for name in REFUSED if others.get(name) is not None]:
        raise UserError(
            f"train.attention is flash, which does not know the {found[0]} of this model; write attention: eager"
        )
    if sequence.size == 1:
        return _each_row(query, key, value, dropout, scaling, sliding_window), None
    query, key, value = sequence.by_heads(query, key, value)
    attended = _each_row(query, key, value, dropout, scaling, sliding_window)
    return sequence.by_tokens(attended), None


def _each_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    if _has_varlen(query, value, dropout):
        return _varlen(query, key, value, scaling, sliding_window)

    def alone(*row: torch.Tensor) -> torch.Tensor:
        return _alone(*row, dropout=dropout, scaling=scaling, window=sliding_window).transpose(1, 2)

    if lengths.of_rows is None:
        return alone(query, key, value).contiguous()
    packed_rows = []
    for number, of_rows in enumerate(lengths.of_rows):
        rows = zip(*(each[number : number + 1].split(of_rows, 2) for each in (query, key, value)), strict=True)
        packed_rows.append(torch.cat([alone(*row) for row in rows], 1))
    return torch.cat(packed_rows) if len(packed_rows) > 1 else packed_rows[0]


def _alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of rows of one length, [batch, heads, tokens, head size]."""
    if short_rows.takes(query, key, dropout, window):
        return short_rows.attend(query, key, value, scaling)
    tokens, mask = query.shape[2], None
    if window is not None and tokens > window:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _has_varlen(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in HALF
        and not dropout
        and max(query.shape[-1], value.shape[-1]) <= VARLEN_HEAD
        and torch.cuda.get_device_capability(query.device) >= VARLEN_CAPABILITY
        and has_varlen_kernel()
    )


@functools.cache
def has_varlen_kernel() -> bool:
    """Return whether this torch has attention for rows of many lengths with all arguments that `_varlen` passes.

    With an older one each row is a call of its own.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attention of rows of many lengths in one call of flash attention's kernels, as `_each_row`.

    They take heads of one size, a multiple of VARLEN_STEP. Zeros behind a query and a key change no score, and those
    behind a value become zeros of the result, which are cut off. DeepSeek's models have values of another size.
    """
    from torch.nn.attention.varlen import varlen_attn

    (batch, heads, tokens, size), own = query.shape, value.shape[-1]
    scaling = size**-0.5 if scaling is None else scaling
    wide = -(-max(size, own) // VARLEN_STEP) * VARLEN_STEP
    query, key, value = (_widened(each.transpose(1, 2).flatten(0, 1), wide) for each in (query, key, value))
    ends, longest = lengths.ends(batch, tokens, query.device), lengths.longest(tokens)
    attended = varlen_attn(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    assert isinstance(attended, torch.Tensor)
    return attended.view(batch, tokens, heads, wide)[..., :own]


def _widened(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Return heads with zeros behind them, up to `size`."""
    missing = size - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def _no_mask(*_: Any, **__: Any) -> None:
    """Return None, the mask that transformers' models get."""


AttentionInterface.register(NAME, each_row)
AttentionMaskInterface.register(NAME, _no_mask)
