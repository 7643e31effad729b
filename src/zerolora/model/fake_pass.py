"""Passes of a model on shapes alone: on fake tensors, which have shapes without values."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an operation's arguments or results: in lists, tuples and dicts."""
    found: list[torch.Tensor] = []
    waiting = [value]
    for each in waiting:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
    return found


@contextlib.contextmanager
def even_splits() -> Iterator[None]:
    """Let a class divide a tensor into parts of sizes that are read from another, as some do with the tokens of each
    expert: into equal parts. With anything else that is computed from such a size, the pass ends with an error."""
    fake: Any = FakeTensor
    replaced = {"tolist": _numbers, "split": _split}
    before = {name: vars(fake)[name] for name in replaced if name in vars(fake)}  # the others are inherited
    for name, function in replaced.items():
        setattr(fake, name, function)
    try:
        yield
    finally:
        for name in replaced:
            if name in before:
                setattr(fake, name, before[name])
            else:
                delattr(fake, name)


def _split(tensor: Any, split_size: Any, dim: int = 0) -> Any:
    if isinstance(split_size, list) and isinstance(split_size[0], _Unknown):
        return tensor.tensor_split(len(split_size), dim)
    return torch.Tensor.split(tensor, split_size, dim)  # type: ignore[no-untyped-call]  # torch's


class _Unknown:
    """A number that a pass on shapes does not know."""


def _numbers(tensor: Any) -> list[_Unknown]:
    if tensor.dim() != 1 or tensor.is_floating_point():
        raise TypeError(f"values of {list(tensor.shape)} are read")
    return [_Unknown()] * len(tensor)


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
