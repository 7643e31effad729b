"""The memory tracer: autograd on tensors with a size and a lifetime but no content.

Traced code mirrors the model code, so that tensors have the same lifetime: until the last Python variable, saved tensor
or gradient buffer that refers to them is gone. benchmarks/memory compares the result with real models.
Sources: torch/csrc/autograd/engine.cpp (order, gradient buffers), tools/autograd/derivatives.yaml (saved tensors).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

SMALL = 32 * 2**20  # bytes from which glibc maps each block separately (mallopt(3), M_MMAP_THRESHOLD's maximum)
BLOCK = 512  # bytes that CUDA's caching allocator rounds up to (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class NothingTrained(Exception):
    """The value of a backward pass depends on no trained parameter."""


class MemoryTracer:
    """Counts the bytes of live storages by kind, and records the counts at the peak."""

    def __init__(self, bucket: float = 0.0) -> None:
        """`bucket`: bytes that the engine allocates with the first gradient of a weight."""
        self.live = self.peak = self.since = 0
        self.bucket = bucket
        self.small = self.small_peak = 0
        self.kinds: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self.kind = "activations"
        self.recording = True
        self.gradients: list[Value] = []
        self._order = 0
        self.nothing = _Storage(self, 0)

    def restart(self) -> None:
        """Reset the peak to the live bytes."""
        self.peak, self.at_peak = self.live, dict(self.kinds)

    def most_since(self) -> int:
        """Return the peak of live bytes since the last call."""
        most, self.since = self.since, self.live
        return most

    def new(self, count: float, width: float) -> "Value":
        """Return a tensor of `count` elements of `width` bytes with a storage of its own."""
        return Value(_Storage(self, count * width), count, width, None)

    def node(self, inputs: Sequence["Value"], saved: Sequence["Value"], backward: Callable[..., Any]) -> "Node | None":
        """Return a node of the graph, None if no input needs a gradient.

        `backward(gradient)` returns the gradients of the inputs, None for an input without one.
        """
        if not self.recording or not any(value.needs_gradient for value in inputs):
            return None
        self._order += 1
        return Node(self._order, [value.source for value in inputs], [value.storage for value in saved], backward)

    def backward(self, value: "Value", gradient: "Value") -> None:
        """Run the backward pass from `value`, the latest node first; each node frees its saved tensors."""
        if not isinstance(value.source, Node):
            raise NothingTrained
        waiting = {value.source: gradient}
        queue = [(-value.source.order, value.source)]
        del gradient
        while queue:
            node = heapq.heappop(queue)[1]
            result = node.backward(waiting.pop(node))
            node.saved = []
            for target, each in zip(node.inputs, result, strict=True):
                if target is None or each is None:
                    continue
                if isinstance(target, Parameter):
                    target.accumulate(each)
                elif target in waiting:
                    waiting[target] = self._sum(waiting.pop(target), each)
                else:
                    waiting[target] = each
                    heapq.heappush(queue, (-target.order, target))
            del result, node, target, each

    def _sum(self, first: "Value", second: "Value") -> "Value":
        return self.new(first.count, first.width)


class _Storage:
    """Bytes that are live as long as this object."""

    __slots__ = ("kind", "size", "tracer")

    def __init__(self, tracer: MemoryTracer, size: float) -> None:
        self.tracer, self.size, self.kind = tracer, -(-int(size) // BLOCK) * BLOCK, tracer.kind
        tracer.live += self.size
        tracer.kinds[self.kind] += self.size
        if tracer.live > tracer.peak:
            tracer.peak, tracer.at_peak = tracer.live, dict(tracer.kinds)
        tracer.since = max(tracer.since, tracer.live)
        if self.size < SMALL:
            tracer.small += self.size
            tracer.small_peak = max(tracer.small_peak, tracer.small)

    def become(self, kind: str) -> None:
        """Count as another kind from now on."""
        self.tracer.kinds[self.kind] -= self.size
        self.tracer.kinds[kind] += self.size
        self.kind = kind

    def __del__(self) -> None:
        self.tracer.live -= self.size
        self.tracer.kinds[self.kind] -= self.size
        if self.size < SMALL:
            self.tracer.small -= self.size


class Node:
    """An operation in the graph."""

    __slots__ = ("backward", "inputs", "order", "saved")

    def __init__(
        self, order: int, inputs: list["Node | Parameter | None"], saved: list[_Storage], backward: Callable[..., Any]
    ) -> None:
        self.order, self.inputs, self.saved, self.backward = order, inputs, saved, backward

    def __lt__(self, other: "Node") -> bool:
        return self.order > other.order


class Value:
    """A tensor: a storage, or a view of one."""

    __slots__ = ("count", "source", "storage", "width")

    def __init__(self, storage: _Storage, count: float, width: float, source: "Node | Parameter | None") -> None:
        self.storage, self.count, self.width, self.source = storage, count, width, source

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient flows to it."""
        return self.source is not None


class Parameter:
    """A trained weight, whose bytes memory/states.py counts."""

    __slots__ = ("computed", "count", "done", "share", "tracer", "width")

    def __init__(
        self, tracer: MemoryTracer, count: float, width: float, share: float, computed: float | None = None
    ) -> None:
        """`width`: bytes of an element, and of its gradient's; `computed`: of an element in computation, by default the
        same."""
        self.tracer, self.count, self.width, self.share = tracer, count, width, share
        self.computed = width if computed is None else computed
        self.done = False

    def accumulate(self, gradient: Value) -> None:
        """Keep this rank's share of a gradient until the optimizer step, as AccumulateGrad or ZeRO's buckets do."""
        tracer = self.tracer
        if tracer.bucket:
            kind, tracer.kind = tracer.kind, "buffers"
            tracer.gradients.append(tracer.new(tracer.bucket, 1))
            tracer.kind, tracer.bucket = kind, 0.0
        if self.done:
            # A tied weight's two gradients are added into a new tensor.
            tracer.new(self.count * bool(self.share), self.width)
        if self.done or not self.share:
            return
        self.done = True
        kind, tracer.kind = tracer.kind, "gradients"
        if self.share == 1:
            # The tensor itself is kept as the gradient.
            gradient.storage.become("gradients")
            tracer.gradients.append(gradient)
        else:
            tracer.gradients.append(tracer.new(self.count * self.share, self.width))
        tracer.kind = kind
