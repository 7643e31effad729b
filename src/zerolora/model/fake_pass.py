"""Passes of a model on shapes alone: on fake tensors, which have shapes without values."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

BY_SHAPES = "batched_mm"
"""transformers' implementation of experts whose shapes do not depend on the tokens' experts."""


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let a pass that ends with an error in the block log none: torch logs its traceback."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def faked(model: Any) -> Iterator[list[torch.Tensor]]:
    """Replace parameters and buffers of a model on the meta device by fake tensors of the host in the block, in a
    FakeTensorMode, and yield these: some operations of peft have no meaning on the meta device."""
    fake: dict[int, Any] = {}
    kept = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            kept.append((tensors, dict(tensors)))
            for name, each in tensors.items():
                if each is not None and id(each) not in fake:
                    value = torch.empty(each.shape, dtype=each.dtype)
                    parameter = tensors is module._parameters
                    fake[id(each)] = torch.nn.Parameter(value, each.requires_grad) if parameter else value
                tensors[name] = None if each is None else fake[id(each)]
    try:
        yield list(fake.values())
    finally:
        for tensors, own in kept:
            tensors.update(own)
