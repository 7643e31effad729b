"""Attention that computes each row of a packed row separately, without a mask.

transformers separates packed rows by a mask of [tokens, tokens], and computes all scores that the mask then hides. Here
the fused kernels get single rows: on CUDA all of them in one call (torch.nn.attention.varlen), elsewhere one call each.
Padding on the right needs no mask: causal attention never reads it. Rows with a common prefix (common_prefix.py) are a
segment for the prefix and one for the rest of each row, whose queries see the keys of the prefix and their own.
"""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from zerolora.errors import UserError
from zerolora.machine.devices import moved, on_gpu
from zerolora.model.architecture import model_class
from zerolora.model.attention_kernels import FLASH_CAPABILITY, FLASH_HEAD
from zerolora.model.attention_trial import unknown, why_not
from zerolora.train import attention_sinks
from zerolora.train.common_prefix import Branches
from zerolora.train.sequence_parallel import sequence

# Its name in transformers, which looks for the package flash-attn where a name contains "flash".
NAME = "each_row"
IMPLEMENTATIONS = {"flash": NAME}
"""Names of transformers for those of the config, where they differ."""
HALF = (torch.float16, torch.bfloat16)
VARLEN_STEP = 8  # of their head sizes
ALIGNMENT = 16
"""Bytes. torch's fused kernels read so many at once, but do not check where the first heads start: on an H200, values
that started at 8 bytes gave wrong results or a misaligned address (benchmarks/results/gpu_agreement.json)."""
LONGEST_SHORT = 192
"""Tokens of the longest row whose attention on a CPU is by plain products. A head's scores, 192 x 192 x 4 bytes = 144
KiB, then fit beside query, key and value into a core's L2 cache (512 KiB or more on current server CPUs)."""


def no_attention(name: str, error: ValueError) -> UserError:
    """Return the error for a model that transformers cannot build with the config's attention."""
    return UserError(
        f"train.attention is {name}, which this model does not have ({str(error).splitlines()[0]:.120}); set "
        "attention: eager"
    )


def check_attention(name: str, config: Any, rendered: bool = False) -> None:
    """Raise UserError if the config's attention cannot replace that of a model's class; `rendered` if `render` has
    tried a class that says that it can.

    Some classes would fail with a KeyError while they are built, others would silently keep their own attention.
    """
    if name == "flash" and (why := why_not(config, believed=rendered)):
        model = model_class(config)
        others = "sdpa or eager" if model._supports_sdpa else "eager"
        raise UserError(f"train.attention is flash, but transformers' {model.__name__} {why}; set attention: {others}")


class Lengths:
    """The row lengths of the current batch, for which models have no argument: set for the forward pass and for the
    backward pass, which may compute a layer again."""

    def __init__(self) -> None:
        self.of_rows: list[list[int]] | None = None
        self.packed = True
        """Whether rows share packed rows; else each has one of its own, with its padding."""
        self.branches: Sequence[Branches] = ()
        """The groups of rows with a common prefix, if the batch is made of them."""
        self.boundaries = False
        """Whether models get the boundaries of rows, for kernels of their mixing modules that keep rows apart."""
        self._ends: torch.Tensor | None = None
        self._ends_of_keys: torch.Tensor | None = None

    def set(self, of_rows: list[list[int]] | None, branches: Sequence[Branches] = (), packed: bool = True) -> None:
        """Set the lengths of the rows in each packed row, padding as the last; None if a packed row is one row. With
        `branches`, they are the segments of one."""
        self.of_rows, self.branches, self.packed = of_rows, branches, packed
        self._ends = self._ends_of_keys = None

    @contextlib.contextmanager
    def of_one_row(self) -> Iterator[None]:
        """Let what is called in the block compute one row, of whatever length."""
        kept = vars(self).copy()
        self.set(None)
        try:
            yield
        finally:
            vars(self).update(kept)

    def seen(self, states: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys, or values, that each segment of the `branches` sees, from [1, heads, tokens, head size]."""
        pieces, result = iter(states.split([size for each in self.branches for size in each.segments], 2)), []
        for each in self.branches:
            prefix = [next(pieces)] if each.prefix else []
            result += prefix
            for _ in each.rests:
                rest = next(pieces)
                result.append(torch.cat([*prefix, rest], 2) if prefix else rest)
        return result

    def ends(self, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Return the boundaries of rows among all tokens of the batch: [rows + 1], int32."""
        if self._ends is None:
            of_rows = self.of_rows or [[tokens]] * batch
            self._ends = _ends(itertools.chain.from_iterable(of_rows), device)
        return self._ends

    def ends_of_keys(self, device: torch.device) -> torch.Tensor:
        """Return the boundaries of what each segment of the `branches` sees (`seen`): [segments + 1], int32."""
        if self._ends_of_keys is None:
            self._ends_of_keys = _ends(self._seen_sizes(), device)
        return self._ends_of_keys

    def of_tokens(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the length of each token's row, fp32: [batch, tokens], the first two dimensions of `embedded`."""
        batch, tokens = len(embedded), embedded.shape[1] * sequence.size
        sizes = [length for row in self.of_rows or [[tokens]] * batch for length in row for _ in range(length)]
        part = sequence.own_part(torch.tensor(sizes, dtype=torch.float32).view(batch, tokens))
        return moved(part, embedded.device)

    def longest(self, tokens: int) -> int:
        """Return the tokens of the longest row."""
        if self.branches:
            return max(self._seen_sizes())
        return max(max(lengths) for lengths in self.of_rows) if self.of_rows else tokens

    def _seen_sizes(self) -> list[int]:
        return [
            size
            for each in self.branches
            for size in ([each.prefix] if each.prefix else []) + [each.prefix + rest for rest in each.rests]
        ]


def _ends(sizes: Iterable[int], device: torch.device) -> torch.Tensor:
    return moved(torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


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
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention of each row: [batch, heads, tokens, head size] -> [batch, tokens, heads, head size].

    The signature is that of transformers' implementations (integrations/sdpa_attention.py); `s_aux` are sinks, [heads].
    Raises UserError if the model adds terms to its scores that the kernels lack.
    """
    unsupported = "mask" if attention_mask is not None else unknown(module, others)
    if s_aux is not None:
        unsupported = unsupported or _without_sinks(query, value, dropout)
    if unsupported:
        raise UserError(
            f"train.attention is flash, which does not support the {unsupported} of this model; set attention: eager"
        )
    if sequence.size > 1:
        query, key, value = sequence.by_heads(query, key, value)
    if _has_varlen(query, value, dropout):
        attended = _varlen(query, key, value, scaling, sliding_window, s_aux)
    else:
        attended = _row_by_row(query, key, value, dropout, scaling, sliding_window, s_aux)
    return (sequence.by_tokens(attended) if sequence.size > 1 else attended), None


def _row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    def attend(*row: torch.Tensor) -> torch.Tensor:
        return _attend(*row, dropout=dropout, scaling=scaling, window=window, sinks=sinks).transpose(1, 2)

    if lengths.branches:
        (sizes,) = lengths.of_rows or [[query.shape[2]]]
        segments = zip(query.split(sizes, 2), lengths.seen(key), lengths.seen(value), strict=True)
        return torch.cat([attend(*segment) for segment in segments], 1)
    if lengths.of_rows is None:
        return attend(query, key, value).contiguous()
    packed_rows = []
    for number, of_rows in enumerate(lengths.of_rows):
        rows = zip(*(each[number : number + 1].split(of_rows, 2) for each in (query, key, value)), strict=True)
        packed_rows.append(torch.cat([attend(*row) for row in rows], 1))
    return torch.cat(packed_rows) if len(packed_rows) > 1 else packed_rows[0]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of rows of one length, [batch, heads, tokens, head size].

    The queries are the last of a row: keys and values may have more tokens, which come before them.
    """
    if sinks is None and is_short(query, key, dropout, window):
        return attend_short(query, key, value, scaling)
    tokens, of_row, mask = query.shape[2], key.shape[2], None
    before = of_row - tokens
    if before or (window is not None and of_row > window):
        mask = torch.ones(tokens, of_row, dtype=torch.bool, device=query.device).tril(before)
        if window is not None:
            mask = mask.triu(before + 1 - window)
    if on_gpu(query.device):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        size = max(query.shape[-1], value.shape[-1])  # wider values were among the wrong results (ALIGNMENT)
        query, key, value = _aligned(_widened(query, size)), _aligned(_widened(key, size)), _aligned(value)
    groups = query.shape[1] // key.shape[1]
    if sinks is not None:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        bias = None if mask is None else query.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
        return attention_sinks.attend(query, key, value, sinks, attention_sinks.on_cpu(scaling, bias))
    if groups > 1 and on_gpu(query.device) and (mask is not None or not _has_flash(query, value)):
        # Kernels without groups of heads; with enable_gqa torch would compute all scores (model/attention_kernels.py).
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
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


def is_short(query: torch.Tensor, key: torch.Tensor, dropout: float, window: int | None) -> bool:
    """Return whether plain products compute these rows, [batch, heads, tokens, head size].

    For short rows in 16 bits, torch's fused kernel for CPUs is several times slower than the products themselves; in
    fp32 it is about as fast (docs/training.md).
    """
    tokens = key.shape[2]
    return (
        query.device.type == "cpu"
        and query.shape[2] <= tokens <= LONGEST_SHORT
        and not dropout
        and (window is None or tokens <= window)
    )


def attend_short(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Return causal attention, [batch, heads, tokens, head size], by plain products in fp32.

    Key and value may have fewer heads, each for several query heads in a row, and more tokens, which come before the
    queries. The backward pass recomputes the scores.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = _ShortAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    assert isinstance(attended, torch.Tensor)
    return attended


class _ShortAttention(torch.autograd.Function):
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
    """Group query heads by key head, fp32: [batch, key heads, heads of each x tokens, head size]."""
    return queries.float().reshape(*key.shape[:2], -1, queries.shape[-1])


def _probabilities(queries: torch.Tensor, keys: torch.Tensor, scaling: float, tokens: int) -> torch.Tensor:
    """Return the attention probabilities: [batch, key heads, heads of each x tokens, tokens of the row]."""
    scores, of_row = (queries @ keys.transpose(-1, -2)).mul_(scaling), keys.shape[2]
    later = torch.ones(tokens, of_row, dtype=torch.bool).triu_(of_row - tokens + 1)
    scores.view(*scores.shape[:2], -1, tokens, of_row).masked_fill_(later, float("-inf"))
    return scores.softmax(-1)


def _without_sinks(query: torch.Tensor, value: torch.Tensor, dropout: float) -> str | None:
    """Return why no kernel computes these heads with sinks; None if one does."""
    if sequence.size > 1:
        return "sinks, in rows that ranks share,"
    if dropout or (on_gpu(query.device) and not _has_varlen(query, value, 0.0)):
        return "sinks, with dropout or without flash attention's kernels on this GPU,"
    return None


def _has_varlen(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    return on_gpu(query.device) and not dropout and _has_flash(query, value) and has_varlen_kernel()


def _has_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether flash attention's kernels take these heads on a GPU, the smaller ones widened."""
    return (
        query.dtype in HALF
        and max(query.shape[-1], value.shape[-1]) <= FLASH_HEAD
        and torch.cuda.get_device_capability(query.device) >= divmod(round(10 * FLASH_CAPABILITY), 10)
    )


@functools.cache
def has_varlen_kernel() -> bool:
    """Return whether this torch has variable-length attention with all arguments of `_varlen`."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of rows of many lengths by one call of flash attention's kernels.

    Their head sizes are equal and a multiple of VARLEN_STEP, but DeepSeek's values have another size than its queries.
    Zeros appended to queries and keys change no score; those of values are cut off the result.
    """
    from torch.nn.attention.varlen import varlen_attn

    (batch, heads, tokens, size), own = query.shape, value.shape[-1]
    scaling = size**-0.5 if scaling is None else scaling
    wide = -(-max(size, own) // VARLEN_STEP) * VARLEN_STEP
    ends, longest = lengths.ends(batch, tokens, query.device), lengths.longest(tokens)
    ends_of_keys = ends
    if lengths.branches:
        # Of a segment with more keys than queries, the kernel aligns the ends, as in flash-attn since 2.1.
        key, value = (torch.cat(lengths.seen(each), 2) for each in (key, value))
        ends_of_keys = lengths.ends_of_keys(query.device)
    enable_gqa = key.shape[1] != heads
    query, key, value = (_aligned(_widened(each.transpose(1, 2).flatten(0, 1), wide)) for each in (query, key, value))
    if sinks is not None:
        seen = window - 1 if window else -1
        kernel = attention_sinks.of_many_lengths(ends, ends_of_keys, longest, scaling, seen)
        sunk = attention_sinks.attend(query, key, value, sinks, kernel)
        return sunk.view(batch, tokens, heads, wide)[..., :own]
    attended = varlen_attn(
        query,
        key,
        value,
        ends,
        ends_of_keys,
        longest,
        longest,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=enable_gqa,
    )
    assert isinstance(attended, torch.Tensor)
    return attended.view(batch, tokens, heads, wide)[..., :own]


def _widened(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Append zeros to heads, up to `size`."""
    missing = size - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def _aligned(heads: torch.Tensor) -> torch.Tensor:
    """Return heads that start at a multiple of ALIGNMENT bytes, as a slice of wider ones may not."""
    return heads.clone() if heads.storage_offset() * heads.element_size() % ALIGNMENT else heads


AttentionInterface.register(NAME, each_row)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
