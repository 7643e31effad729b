"""What fully_shard gathers together: each layer, and everything outside the layers (train/engines/fsdp.py, wrap).

Source of what is gathered when: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. All ranks send a unit's
shards into one buffer, from which its weights are copied into tensors of their own, so that a unit takes twice its
size. In the forward pass the buffer is kept while the layer computes, and until the next layer's weights have been
copied (wait_for_unshard); in the backward pass it is freed, and the next layer's is filled meanwhile
(_backward_prefetch). The root's weights stay gathered from the beginning of the forward pass to the end of the
backward pass (_fsdp_state.py, _lazy_init). A unit's gradients are whole until they are joined in fp32, and sent, when
the unit has been freed; what was sent is freed when the next unit's are joined (post_backward). Before the last
micro-step of an optimizer step all stay whole, in fp32 (_fsdp_param.py, to_accumulated_grad_if_needed).
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from zerolora.model.spec import ModelSpec, Module

TOWER_LAYERS = ("layers", "layer", "blocks")
"""Names of the lists of layers that a vision or audio tower has, which are units; lists of other names, as of mergers,
are not (_no_split_modules of transformers' classes)."""

REDUCED = 4
"""Bytes of a gradient that is reduced or accumulated (strategies/torch_native.py, fsdp.reduce_dtype)."""


@dataclass(frozen=True)
class Units:
    """Parameters that are gathered together in a step of text."""

    root: float
    """Outside of all layers: embedding, head, last norm, projectors."""
    layers: tuple[float, ...]
    """Of each layer, in their order. Layers of towers are never gathered: no image or audio is read."""

    @property
    def total(self) -> float:
        """Parameters of all units."""
        return self.root + sum(self.layers)

    def with_adapter(self, inside: float, outside: float) -> "Units":
        """Return the units with what a method adds: `inside` the layers, each of which gets a share as its size is, and
        `outside` of them."""
        share = 1 + inside / max(1, sum(self.layers))
        return Units(self.root + outside, tuple(layer * share for layer in self.layers))

    def computing(self, alone: bool) -> float:
        """Return the most parameters that are gathered while a layer computes. `alone`: no rank shares its weights, and
        there are no buffers."""
        return self.root + (1 if alone else 2) * max(self.layers, default=0)

    def reaching(self, alone: bool) -> list[float]:
        """Return the most parameters that are gathered before each layer's forward pass: before the first one, the
        root's buffer is still there."""
        if alone:
            return [self.root + layer for layer in self.layers]
        return [self.root + 2 * layer + before for before, layer in pairwise((self.root, *self.layers))]

    def backward(self, trained: "Units", width: int, alone: bool, accumulates: bool) -> float:
        """Return the most bytes of gathered weights and whole gradients in the backward pass of a layer, without the
        gradient of the head.

        `trained`: what of each unit is trained; `width`: bytes of a weight; `accumulates`: over several micro-steps.
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


def fsdp_units(model: ModelSpec) -> Units:
    """Return the units of a model."""
    layers: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    root = 0
    for module in model.modules:
        if _in_tower_layer(module):
            continue
        if module.stack and module.kind != "outside":
            for number in module.numbers:
                layers[module.stack][number] += module.parameters
        else:
            root += module.parameters * module.count
    return Units(root, tuple(size for stack in layers.values() for _, size in sorted(stack.items())))


def _in_tower_layer(module: Module) -> bool:
    return module.kind == "outside" and module.stack.rpartition(".")[2] in TOWER_LAYERS
