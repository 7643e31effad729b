"""The call of flash attention's kernels on CUDA, with a stand-in that checks their requirements."""

import importlib
from typing import Any

import pytest
import torch

from zerolora.train import attention
from zerolora.train.attention import each_row, lengths

ROWS = [[5, 3, 9], [17]]
HEADS = {
    "Llama": (32, 32, 4, 2, None, None),
    "DeepSeek V3": (48, 32, 4, 4, 0.2, None),
    "values larger than queries": (16, 24, 2, 2, None, None),
    "no multiple of 8": (20, 20, 4, 1, None, None),
    "a window": (24, 20, 4, 2, None, 4),
}


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute attention of [tokens, heads, size] with the checks of torch.nn.attention.varlen (flash_api.cpp)."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    assert query.dtype == key.dtype == value.dtype == torch.float16 and torch.equal(cu_seq_q, cu_seq_k)
    assert (query.shape[1] != key.shape[1]) == enable_gqa and max_q == max_k
    rows = []
    for first, last in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        own: list[Any] = [each[first:last].transpose(0, 1).float() for each in (query, key, value)]
        mask = torch.ones(last - first, last - first, dtype=torch.bool).tril()
        if window_size[0] >= 0:
            mask = mask.triu(-window_size[0])
        attended = torch.nn.functional.scaled_dot_product_attention(
            own[0], own[1], own[2], mask, scale=scale, enable_gqa=enable_gqa
        )
        rows.append(attended.transpose(0, 1))
    return torch.cat(rows).half()


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_every_shape_equal_row_by_row_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, own, heads, key_heads, scaling, window = HEADS[name]
    torch.manual_seed(0)
    inputs: list[Any] = [
        torch.randn(2, number, 17, width).half()
        for number, width in ((heads, size), (key_heads, size), (key_heads, own))
    ]
    module = importlib.import_module("torch.nn.attention.varlen")
    monkeypatch.setattr(module, "varlen_attn", kernel)
    lengths.set(ROWS)
    try:
        actual = []
        for on_gpu in (True, False):
            monkeypatch.setattr(attention, "_has_varlen", lambda *_, on_gpu=on_gpu: on_gpu)
            tensors = [each.float() if not on_gpu else each for each in inputs]
            attended, _ = each_row(
                torch.nn.Module(), tensors[0], tensors[1], tensors[2], None, scaling=scaling, sliding_window=window
            )
            assert attended.shape == (2, 17, heads, own)
            actual.append(attended.float())
    finally:
        lengths.set(None)
    torch.testing.assert_close(actual[0], actual[1], rtol=0, atol=4e-3)  # fp16


def test_unsupported_head_sizes_use_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    query, wide = (torch.empty(1, 1, 1, size, dtype=torch.float16, device="meta") for size in (256, 264))

    class OnGpu:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.device, self.dtype, self.shape = torch.device("cuda"), tensor.dtype, tensor.shape

    assert attention._has_varlen(OnGpu(query), OnGpu(query), 0.0)  # type: ignore[arg-type]
    assert not attention._has_varlen(OnGpu(wide), OnGpu(query), 0.0)  # type: ignore[arg-type]
    assert not attention._has_varlen(OnGpu(query), OnGpu(wide), 0.0)  # type: ignore[arg-type]
