"""The weights that DeepSpeed's stage 3 keeps gathered, by a simulation of its coordinator on sizes.

It gathers the weights of a module when the module is reached, and prefetches those of the next modules until a bucket
is full or the limit of live weights is reached. The last weight of a bucket is gathered whole, and so are all weights
of one module, such as a layer's experts. Weights that are gathered together arrive in one buffer, from which each is
copied; the buffer is freed when the last of them is used, so most are live twice for a while. Experts' weights are
multiplied as transposed views that are saved for the backward pass: the weights that the forward pass gathered stay
live until then, beside those gathered again (transformers/integrations/moe.py, _grouped_linear).
Sources: deepspeed/runtime/zero/partitioned_param_coordinator.py, fetch_sub_module and release_sub_module;
partition_parameters.py, all_gather_coalesced and AllGatherCoalescedHandle.
"""

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from zerolora.methods.method import SHARED, Method
from zerolora.model.spec import ModelSpec, Module
from zerolora.strategies.strategy import Buckets

Ranks = tuple[tuple[str, int], ...]
"""Path and r of each adapted module or parameter, as in TrainedParameters."""
TRANSPOSED = ("aria", "aria_text", "gpt_oss")
"""Families whose experts' weights are multiplied without a transposed view."""


@dataclass(frozen=True)
class Gathered:
    """The most elements of gathered weights on a rank in each part of a step."""

    forward: tuple[tuple[str, int, int], ...]
    """From each module of a layer to the next: the module's path, the number of later layers, and elements; only where
    no later layer has as many."""
    loss: int
    backward: int
    """Until the end of the last layer's backward pass."""
    before_last: int
    """In the backward pass of the layer before."""
    backward_end: int
    """In the backward passes of all other layers."""


@functools.lru_cache(maxsize=8192)
def gathered(
    model: ModelSpec,
    ranks: Ranks,
    buckets: Buckets,
    checkpointing: bool,
    keeps_head: bool,
    together: bool,
    method: Method,
    width: int,
) -> Gathered:
    """Return the gathered weights of a rank. `ranks` is empty in full fine-tuning.

    `keeps_head`: the head's weight is live in the whole step, as with a fused loss (train/loss.py). `together`: weights
    gathered at once arrive in one buffer, as among several ranks. `method` packs quantized weights; `width` is the
    bytes of an element.
    """
    before, layers, after = _modules(model, dict(ranks), lambda module: method.packed(module, width))
    every = [*before, *(owner for layer in layers for owner in layer), *after]
    backward: list[list[_Owner]] = [after[::-1], [], []]
    for number, layer in enumerate(reversed(layers)):
        backward[min(number, 2)] += [*(layer if checkpointing else ()), *reversed(layer)]
    if checkpointing or not ranks:  # with checkpointing the embedding's result needs a gradient
        backward[2] += before[::-1]
    # Small weights stay gathered after their first use.
    limit = buckets.persistence
    small = sum(each.size for each in {each for owner in every for each in owner.weights} if each.size <= limit)
    parts = [[each for owner in part if (each := owner.without(limit))] for part in (every, *backward)]
    if keeps_head:
        heads = {module.path for module in model.modules if module.kind == "head"}
        parts[0][:0] = [owner for owner in parts[0] if owner.path in heads]
        for owner in parts[0]:
            for weight in owner.weights:
                weight.kept = weight.kept or owner.path in heads
    coordinator = _Coordinator([owner.weights for part in parts for owner in part], buckets, together)
    forward: dict[tuple[str, int], int] = defaultdict(int)
    loss, at = 0, ("", len(layers))
    if not parts[0]:  # every weight is small
        forward[at] = loss = small
    for owner in parts[0]:
        arriving, most = coordinator.use(not checkpointing)
        # A module's weights are copied before it computes.
        if owner.layer is None:
            forward[at] = max(forward[at], small + arriving)
            loss = small + most
        else:
            at = owner.path, len(layers) - 1 - owner.layer
            forward[at] = max(forward[at], small + arriving, small + most)
    rest = [small + max((each for _ in part for each in coordinator.use(False)), default=0) for part in parts[1:]]
    return Gathered(tuple(_growing(forward)), loss, *rest)


def _growing(forward: dict[tuple[str, int], int]) -> Iterator[tuple[str, int, int]]:
    """Yield the elements from each module on, the last layer first, where they exceed those of all later layers."""
    most: dict[str, int] = defaultdict(int)
    for (path, later), size in reversed(forward.items()):
        if size > most[path]:
            most[path] = size
            yield path, later, size


@dataclass(eq=False)
class _Weight:
    """A weight, in elements."""

    size: int
    available: bool = False
    """Whether it is gathered or being gathered."""
    buffer: "_Buffer | None" = None
    """The buffer in which it arrives, until it is used."""
    kept_until: int = -1
    """Number of the last module in the look-ahead that uses it."""
    kept: bool = False
    """Whether it is used until the end of the step."""
    viewed: bool = False
    """Whether a view of it is saved for the backward pass."""
    saved: int = 0
    """Elements that the view keeps after its release."""


@dataclass(eq=False)
class _Buffer:
    """Weights that are gathered together."""

    size: int
    unused: int
    """Weights that no module has used yet."""
    copied: bool = False


@dataclass(frozen=True)
class _Owner:
    """A module with its weights."""

    path: str
    layer: int | None
    """Number of its layer; None outside the layers."""
    weights: list[_Weight]

    def without(self, limit: int) -> "_Owner | None":
        """Return the module with its weights above a size; None if there are none."""
        large = [weight for weight in self.weights if weight.size > limit]
        return _Owner(self.path, self.layer, large) if large else None


class _Coordinator:
    """One step over a recorded order of modules, each a list of weights."""

    def __init__(self, modules: list[list[_Weight]], buckets: Buckets, together: bool) -> None:
        self.modules, self.buckets, self.together = modules, buckets, together
        self.queue = deque((weight, number) for number, module in enumerate(modules) for weight in module)
        self.number = 0  # of the next module
        self.live = 0  # as DeepSpeed counts, without buffers
        self.held = self.peak = 0

    def use(self, saves: bool) -> tuple[int, int]:
        """Use the next module; return the most elements until its weights are copied, and from then on.

        `saves`: its backward pass comes later.
        """
        number, module = self.number, self.modules[self.number]
        self.peak = self.held
        self.gather(weight for weight in module if not weight.available)
        for weight in module:
            self.wait(weight)
        arriving, self.peak = self.peak, self.held
        self.look_ahead(number, module)
        self.prefetch()
        for weight in module:
            if weight.kept_until <= number and not weight.kept:
                self.release(weight, weight.viewed and saves)
            if not saves:
                self.hold(-weight.saved)
                weight.saved = 0
        self.number += 1
        return arriving, self.peak

    def gather(self, weights: Iterable[_Weight]) -> None:
        """Start gathering weights."""
        wanted = list(weights)
        size = sum(weight.size for weight in wanted)
        buffer = _Buffer(size, len(wanted)) if len(wanted) > 1 and self.together else None
        for weight in wanted:
            weight.available, weight.buffer = True, buffer
        self.live += size
        self.hold(size)

    def wait(self, weight: _Weight) -> None:
        """Copy all weights from a weight's buffer; free the buffer with the last of them."""
        buffer, weight.buffer = weight.buffer, None
        if buffer is None:
            return
        if not buffer.copied:
            buffer.copied = True
            self.hold(buffer.size)
        buffer.unused -= 1
        if not buffer.unused:
            self.hold(-buffer.size)

    def look_ahead(self, number: int, module: list[_Weight]) -> None:
        """Remove a module's weights from the queue."""
        waiting = {weight for weight in module if weight.kept_until < number}
        while self.queue and waiting:
            weight, step = self.queue.popleft()
            weight.kept_until = step
            waiting.discard(weight)

    def prefetch(self) -> None:
        """Gather the next weights, within a bucket and the limit of live weights."""
        room, size = min(self.buckets.live - self.live, self.buckets.prefetch), 0
        result: dict[_Weight, None] = {}
        while self.queue and size < room:
            weight, number = self.queue.popleft()
            weight.kept_until = max(weight.kept_until, number)
            if not weight.available and weight not in result:
                result[weight] = None
                size += weight.size
        if result:
            self.gather(result)

    def release(self, weight: _Weight, saved: bool) -> None:
        """Release a weight; `saved`: a view keeps its elements."""
        weight.available = False
        self.live -= weight.size
        if saved:
            weight.saved += weight.size
        else:
            self.hold(-weight.size)

    def hold(self, size: int) -> None:
        """Add elements to those on the rank."""
        self.held += size
        self.peak = max(self.peak, self.held)


def _modules(
    model: ModelSpec, ranks: dict[str, int], packed: Callable[[Module], float]
) -> tuple[list[_Owner], list[list[_Owner]], list[_Owner]]:
    """Return the modules with weights before the layers, in each layer, and after the layers."""
    shared = _Weight(model.vocabulary * model.hidden)  # of embedding and head, if they are tied
    in_layers = set(model.in_layers)
    layers: list[list[_Owner]] = [[] for _ in range(1 + max(max(module.numbers) for module in in_layers))]
    before: list[_Owner] = []
    after: list[_Owner] = []
    for module in model.modules:
        if module in in_layers:
            for number in module.numbers:
                layers[number] += _owners(module, ranks, packed, number, model.family not in TRANSPOSED)
        elif module.kind != "outside" and not module.stack:
            tied = model.tied and module.kind in SHARED and module.parameters in (0, shared.size)
            result = [_Owner(module.path, None, [shared])] if tied else _owners(module, ranks, packed, None)
            (before if module.kind == "embedding" else after).extend(result)
    return before, layers, after


def _owners(
    module: Module,
    ranks: dict[str, int],
    packed: Callable[[Module], float],
    layer: int | None,
    viewed: bool = False,
) -> Iterator[_Owner]:
    """Yield a module and its adapter's modules, each with its weights."""
    saved = module.parameters - packed(module)
    # By the one matrix of a quantized module, or by the stacked ones of experts.
    most = max((len(shape) for _, shape in module.weights), default=0)
    share = saved / max(1, sum(math.prod(shape) for _, shape in module.weights if len(shape) == most))
    yield _Owner(
        module.path,
        layer,
        [
            _Weight(
                math.prod(shape) - (round(share * math.prod(shape)) if len(shape) == most else 0),
                viewed=viewed and len(shape) == 3 and not saved and f"{module.path}.{name}" not in ranks,
            )
            for name, shape in module.weights
        ],
    )
    if r := ranks.get(module.path):
        yield _Owner(module.path, layer, [_Weight(r * module.inputs)])
        yield _Owner(module.path, layer, [_Weight(r * module.outputs)])
    for name, shape in module.weights:
        if len(shape) > 1 and (r := ranks.get(f"{module.path}.{name}")):
            *experts, outputs, inputs = shape
            yield _Owner(module.path, layer, [_Weight(r * math.prod(experts) * size) for size in (inputs, outputs)])
