"""Activation offload (DeepSpeed's ALST, arXiv 2506.13996): inputs of checkpointed layers wait on the host.

Between forward and backward pass a checkpointed layer keeps its input alone. Here that is moved to pinned host memory
and copied back when the layer is computed again. What recomputed layers, norms and the loss save stays on the device.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

FUNCTION = "_gradient_checkpointing_func"  # of transformers' modules that checkpoint


def offload_inputs(model: Any, device: torch.device) -> None:
    """Move what checkpointed layers of a transformers model save to the host.

    On a CPU they save the same tensors as before: no copy is made. transformers' own option (`offload` of
    `activation_checkpointing_enable`) asks for pinned memory there, which needs a GPU, and moves masks too.
    """
    for module in model.modules():
        if hasattr(module, FUNCTION):
            setattr(module, FUNCTION, partial(_checkpointed, getattr(module, FUNCTION), device.type != "cpu"))


def _checkpointed(checkpoint: Callable[..., Any], pinned: bool, layer: Callable[..., Any], *inputs: Any) -> Any:
    """Checkpoint a layer, of whose inputs only those with a gradient are saved to the host: the hidden states.

    Others, such as masks, are the same tensors for every layer, so a copy for each would take more memory. An
    embedding's result that is a leaf of the graph is alive until it has its gradient, wherever a copy is. Saved tensors
    of the layer itself are never seen by these hooks: reentrant checkpointing computes it without a graph,
    non-reentrant checkpointing has hooks of its own inside (torch/utils/checkpoint.py).
    """
    own = [isinstance(each, torch.Tensor) and each.requires_grad for each in inputs]
    hidden = [each for each, is_own in zip(inputs, own, strict=True) if is_own]
    others = [None if is_own else each for each, is_own in zip(inputs, own, strict=True)]

    def called(*states: torch.Tensor) -> Any:  # what it refers to stays on the device
        waiting = iter(states)
        return layer(*(next(waiting) if is_own else each for each, is_own in zip(others, own, strict=True)))

    moving = save_on_cpu(pin_memory=pinned) if not any(each.is_leaf for each in hidden) else contextlib.nullcontext()
    with moving:
        return checkpoint(called, *hidden)
