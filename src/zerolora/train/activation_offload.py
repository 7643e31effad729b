"""Activation offload (DeepSpeed's ALST, arXiv 2506.13996): inputs of checkpointed layers are kept on the host.

Between forward and backward pass a checkpointed layer saves only its input. Here it is moved to pinned host memory and
copied back for the recomputation, by a stream beside the computing one. The saved tensors of recomputed layers, norms
and the loss stay on the device.
"""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from zerolora.machine.devices import on_gpu

FUNCTION = "_gradient_checkpointing_func"  # of transformers' modules that checkpoint


def offload_inputs(model: Any, device: torch.device) -> None:
    """Move the saved inputs of a transformers model's checkpointed layers to the host; on a CPU, without a copy.

    transformers' own (`offload` of `activation_checkpointing_enable`) needs a GPU, for pinned memory, copies on the
    computing stream, and moves masks.
    """
    hooks = OnOwnStream(device) if on_gpu(device) else save_on_cpu()
    for module in model.modules():
        if hasattr(module, FUNCTION):
            setattr(module, FUNCTION, partial(_checkpointed, getattr(module, FUNCTION), hooks))


class OnOwnStream(saved_tensors_hooks):
    """Keeps saved tensors in pinned host memory, copied by a stream of its own while the device computes.

    In the forward pass the computation waits, at the next tensor, for the copy of the one before; in the backward pass
    a tensor comes back while the layer after it is computed. So at most one tensor is on its way, and the device has
    one more than with save_on_cpu. DeepSpeed's CheckpointHiddenStatesOffload and TRL's OffloadActivations do not bound
    what is on its way back: their tensors are in blocks of the copying stream, which the computing one frees late.

    Memory: each tensor is allocated by the computing stream, so `record_stream` keeps its block from others until the
    copy has ended (torch/docs/source/notes/cuda.rst, CUDA streams), and a copy to the device waits for what was
    computed before its block was allocated. Pinned memory is not reused before its copies have ended, either
    (ATen/core/CachingHostAllocator.h), and a stream's copies run in order, so a tensor comes back after it has gone.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._pack, self._unpack)
        self._stream = torch.cuda.Stream(device)
        self._gone: torch.cuda.Event | None = None
        self._last: weakref.ref[_Saved] | None = None

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        computing = torch.cuda.current_stream(tensor.device)
        if self._gone:
            computing.wait_event(self._gone)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            host = tensor.new_empty(tensor.shape, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        self._gone = self._stream.record_event()
        saved = _Saved(host, tensor.device, self._last)
        self._last = weakref.ref(saved)
        return saved

    def _unpack(self, saved: "_Saved") -> torch.Tensor:
        computing = torch.cuda.current_stream(saved.device)
        tensor, back = saved.coming or self._fetch(saved, computing)
        saved.coming = None
        computing.wait_event(back)
        before = saved.before and saved.before()
        if before and not before.coming:
            before.coming = self._fetch(before, computing)
        return tensor

    def _fetch(self, saved: "_Saved", computing: torch.cuda.Stream) -> "tuple[torch.Tensor, torch.cuda.Event]":
        """Start the copy of a tensor to the device, and return it with the end of the copy."""
        tensor = torch.empty_like(saved.host, device=saved.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            tensor.copy_(saved.host, non_blocking=True)
        tensor.record_stream(self._stream)
        return tensor, self._stream.record_event()


class _Saved:
    """A saved tensor on the host."""

    def __init__(self, host: torch.Tensor, device: torch.device, before: "weakref.ref[_Saved] | None") -> None:
        self.host, self.device = host, device
        self.before = before
        """The tensor saved before it, which the backward pass needs next, while a graph still has it."""
        self.coming: tuple[torch.Tensor, torch.cuda.Event] | None = None
        """The copy under way, and its end."""


def _checkpointed(
    checkpoint: Callable[..., Any], hooks: saved_tensors_hooks, layer: Callable[..., Any], *inputs: Any
) -> Any:
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

    with hooks if not any(each.is_leaf for each in hidden) else contextlib.nullcontext():
        return checkpoint(called, *hidden)
