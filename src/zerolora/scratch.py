"""Buffers that a thread uses again: every 4 KiB of fresh memory cost a page fault, which takes longer than a sum."""

import threading

import torch

LARGEST = 2**23
"""Bytes of a buffer that is kept; a larger one is made anew."""


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_use: dict[str, torch.Tensor] = {}


_buffers = _Buffers()


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of any content, whose memory this thread has for `use`: the next call gives it out again."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size > LARGEST:
        return torch.empty(shape, dtype=dtype)
    buffer = _buffers.by_use.get(use)
    if buffer is None or buffer.numel() < size:
        buffer = _buffers.by_use[use] = torch.empty(size, dtype=torch.uint8)
    return buffer[:size].view(dtype).view(shape)
