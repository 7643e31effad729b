"""The units that fully_shard gathers: each layer, and everything outside the layers (train/engines/fsdp.py, wrap).

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. All ranks send a unit's shards into one buffer, from
which its weights are copied into tensors of their own, so a unit takes twice its size. In the forward pass the buffer
lives while the layer computes, until the next layer's weights have been copied (wait_for_unshard); in the backward pass
it is freed, and the next layer's is filled meanwhile (_backward_prefetch). The root's weights stay gathered from the
beginning of the forward pass to the end of the backward pass (_fsdp_state.py, _lazy_init). A unit's gradients are whole
until the unit is freed; then they are copied into one fp32 buffer and sent, and that buffer is freed when the next
unit's is filled (post_backward). Before the last micro-step of an optimizer step all stay whole, in fp32
(_fsdp_param.py, to_accumulated_grad_if_needed).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from zerolora.model.spec import ModelSpec, Module

TOWER_LAYERS = ("layers", "layer", "blocks")
"""Names of a vision or audio tower's lists of layers that are units (_no_split_modules of transformers' classes); lists
of other names, as of mergers, are not."""

REDUCED = 4
"""Bytes of a reduced or accumulated gradient (strategies/torch_native.py, fsdp.reduce_dtype)."""


@dataclass(frozen=True)
class Units:
    """Parameters of each unit that is gathered in a step of text."""

    root: float
    """Outside of all layers: embedding, head, last norm, projectors."""
    layers: tuple[float, ...]
    """Of each layer, in order, without layers of towers, which no text reaches."""

    @property
    def total(self) -> float:
        """Parameters of all units."""
        return self.root + sum(self.layers)

    def with_adapter(self, inside: float, outside: float) -> "Units":
        """Return the units with an adapter's parameters: `inside` the layers, in proportion to their sizes, and
        `outside` of them."""
        share = 1 + inside / max(1, sum(self.layers))
        return Units(self.root + outside, tuple(layer * share for layer in self.layers))

    def computing(self, alone: bool) -> float:
        """Return the most gathered parameters while a layer computes. `alone`: one rank has all weights, without
        buffers."""
        return self.root + (1 if alone else 2) * max(self.layers, default=0)

    def buffers(self) -> float:
        """Return the most parameters in all-gather buffers at once: two units in a row, the root before the first
        layer."""
        return max((one + other for one, other in pairwise((self.root, *self.layers))), default=self.root)

    def reaching(self, alone: bool) -> list[float]:
        """Return the most gathered parameters before each layer's forward pass; before the first one, the root's buffer
        is still live."""
        if alone:
            return [self.root + layer for layer in self.layers]
        return [self.root + 2 * layer + before for before, layer in pairwise((self.root, *self.layers))]

    def backward(self, trained: "Units", width: int, alone: bool, accumulates: bool) -> float:
        """Return the most bytes of gathered weights and whole gradients in a layer's backward pass, without the head's
        gradient.

        `trained`: the trained parameters of each unit; `width`: bytes of a weight; `accumulates`: over micro-steps.
        """
        most, sent = 0.0, 0.0
        buffers = 0 if alone else width
        for number, (layer, own) in reversed(list(enumerate(zip(self.layers, trained.layers, strict=True)))):
            ahead = buffers * (self.layers[number - 1] if number else 0)
            whole = REDUCED * (trained.root + sum(trained.layers[: number + 1])) if accumulates else 0.0
            joining = ahead + (REDUCED + (0 if accumulates else width)) * own
            computing = ahead + width * (layer + own) + sent
            most = max(most, whole + max((width + buffers) * layer + sent, computing, joining))
            sent = REDUCED * own
        return self.root * width + most


def fsdp_units(model: ModelSpec, size: Callable[[Module], float]) -> Units:
    """Return the units of a model; `size` returns the parameters of one copy of a module."""
    layers: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    root = 0.0
    for module in model.modules:
        if module.kind == "outside" and module.stack.rpartition(".")[2] in TOWER_LAYERS:
            continue
        if module.stack and module.kind != "outside":
            for number in module.numbers:
                layers[module.stack][number] += size(module)
        else:
            root += size(module) * module.count
    return Units(root, tuple(size for stack in layers.values() for _, size in sorted(stack.items())))
