"""Decoder layers compiled by torch (train.compile), in training mode; attention row by row stays as it is.

A layer is compiled inside its activation checkpointing: around it, torch would run everything as it is. Attention row
by row reads the rows' lengths from a list, each of which would be a graph of its own, so it is called between two
graphs. Batches are padded to few lengths (feed.py, Padding), each of which is compiled once.
"""

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from zerolora.errors import UserError
from zerolora.train.attention import NAME, each_row
from zerolora.train.module_forwards import SparseDropout

VARIANTS = 64
"""Graphs of one piece of code: for each length, with and without gradients, for the first layer and the others."""


class Compiled:
    """The compiled layers of this process, and what they compiled."""

    def __init__(self) -> None:
        self.again = 0
        """Graphs that were compiled in a step all of whose batches had the shape of an earlier step's."""
        self._shapes: set[torch.Size] = set()
        self._seen: set[torch.Size] = set()
        self._before = 0

    @property
    def graphs(self) -> int:
        """Graphs that were compiled so far."""
        return int(counters["stats"]["unique_graphs"])

    def use(self, model: Any, device: torch.device) -> None:
        """Compile the layers of a transformers model, before an engine wraps it. Raises UserError if it has none that
        can be compiled, or on a CPU without a C++ compiler."""
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise UserError(
                f"train.compile is true, but a {model.config.model_type} has no decoder layers to compile; set it to "
                "false"
            )
        if device.type == "cpu":
            _check_compiler()
            torch._inductor.config.compile_threads = 1  # ranks share the cores
        torch._dynamo.config.recompile_limit = VARIANTS
        torch._dynamo.config.accumulated_recompile_limit = 4 * VARIANTS
        # Dropout draws what it draws uncompiled.
        torch._inductor.config.fallback_random = True
        AttentionInterface.register(NAME, torch.compiler.disable(each_row))
        for module in model.modules():
            if isinstance(module, SparseDropout) and device.type == "cpu":
                vars(module)["forward"] = torch.compiler.disable(module.forward)
        forwards: dict[type, Callable[..., Any]] = {}
        for layer in layers:
            own = inspect.unwrap(type(layer).forward)
            compiled = forwards.setdefault(type(layer), torch.compile(own, dynamic=False))
            layer.forward = types.MethodType(partial(self._forward, own, compiled), layer)

    def _forward(
        self, own: Callable[..., Any], compiled: Callable[..., Any], layer: Any, *inputs: Any, **named: Any
    ) -> Any:
        if not layer.training:
            return own(layer, *inputs, **named)
        self._shapes.add(inputs[0].shape)
        if layer.gradient_checkpointing:
            return layer._gradient_checkpointing_func(partial(compiled, layer, **named), *inputs)
        return compiled(layer, *inputs, **named)

    def after_step(self) -> None:
        """Count the graphs of an optimizer step."""
        if self._shapes <= self._seen:
            self.again += self.graphs - self._before
        self._seen |= self._shapes
        self._shapes, self._before = set(), self.graphs

    def summary(self) -> dict[str, int]:
        """Return the figures of train_resources.json; empty if nothing was compiled."""
        if not self._seen:
            return {}
        return {"compiled_graphs": self.graphs, "compiled_lengths": len(self._seen), "recompiled_graphs": self.again}


compiled_layers = Compiled()


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "train.compile is true, but torch finds no C++ compiler, which it needs on a CPU; install g++, or set it "
            "to false"
        ) from None
