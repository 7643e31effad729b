"""Activation offload (DeepSpeed's ALST, arXiv 2506.13996): inputs of checkpointed layers are kept on the host.

Between forward and backward pass a checkpointed layer saves only its input. Here it is moved to pinned host memory and
copied back for the recomputation. The saved tensors of recomputed layers, norms and the loss stay on the device.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

FUNCTION = "_gradient_checkpointing_func"  # of transformers' modules that checkpoint


def offload_inputs(model: Any, device: torch.device) -> None:
    """Move the saved inputs of a transformers model's checkpointed layers to the host; on a CPU, without a copy.

    transformers' own (`offload` of `activation_checkpointing_enable`) needs a GPU, for pinned memory, and moves masks.
    """
    for module in model.modules():
        if hasattr(module, FUNCTION):
            setattr(module, FUNCTION, partial(_checkpointed, getattr(module, FUNCTION), device.type != "cpu"))


def _checkpointed(checkpoint: Callable[..., Any], pinned: bool, layer: Callable[..., Any], *inputs: Any) -> Any:
    """Checkpoint a layer, and save only those of its inputs to the host that have a gradient: the hidden states.

    Others, such as masks, are the same tensors for every layer, so a copy for each would take more memory. A leaf of
    the graph, as an embedding's result can be, lives until it has its gradient, so a copy would save nothing. These
    hooks never see the layer's own saved tensors: reentrant checkpointing computes it without a graph, non-reentrant
    checkpointing has its own hooks inside (torch/utils/checkpoint.py).
    """
    own = [isinstance(each, torch.Tensor) and each.requires_grad for each in inputs]
    hidden = [each for each, is_own in zip(inputs, own, strict=True) if is_own]
    others = [None if is_own else each for each, is_own in zip(inputs, own, strict=True)]

    def called(*states: torch.Tensor) -> Any:  # its closure stays on the device
        waiting = iter(states)
        return layer(*(next(waiting) if is_own else each for each, is_own in zip(others, own, strict=True)))

    moving = save_on_cpu(pin_memory=pinned) if not any(each.is_leaf for each in hidden) else contextlib.nullcontext()
    with moving:
        return checkpoint(called, *hidden)
