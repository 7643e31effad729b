"""A transformer's operations on the memory tracer: what each allocates and saves for the backward pass.

Source: torch's tools/autograd/derivatives.yaml. Widths are bytes per element, counts are elements.
"""

from collections.abc import Callable
from typing import Any

from zerolora.model.tracer import MemoryTracer, Parameter, Value


class Operations:
    """Operations on the values of one memory tracer."""

    def __init__(self, tracer: MemoryTracer) -> None:
        self.tracer = tracer

    def _result(
        self, count: float, width: float, inputs: list[Value], saved: list[Value], backward: Callable[..., Any]
    ) -> Value:
        result = self.tracer.new(count, width)
        result.source = self.tracer.node(inputs, saved, backward)
        return result

    def of(self, weight: Parameter) -> Value:
        """Return a trained weight: without bytes of its own, or a copy in the compute width, made at each use, whose
        gradient is cast back (train/engines/ddp.py, _Cast)."""
        return self.cast(Value(self.tracer.nothing, weight.count, weight.width, weight), weight.computed)

    def view(self, value: Value, count: float | None = None) -> Value:
        """Trace a view with another shape, or of a part."""
        result = Value(value.storage, value.count if count is None else count, value.width, None)
        result.source = self.tracer.node([value], [], lambda gradient: [gradient])
        return result

    def linear(
        self, value: Value, inputs: float, outputs: float, weight: Parameter | None = None, saves: bool = False
    ) -> Value:
        """Trace x·Wᵀ, which saves the input if the weight is trained or `saves` is set, and a trained weight for the
        input's gradient."""
        new, count, width = self.tracer.new, value.count, value.width
        needed = value.needs_gradient

        def backward(gradient: Value) -> list[Value | None]:
            result = [new(count, width) if needed else None]
            return [*result, new(inputs * outputs, width)] if weight else result

        trained = [self.of(weight)] if weight else []
        return self._result(
            count / inputs * outputs,
            width,
            [value, *trained],
            [*([value] if weight or saves else []), *(trained if needed else [])],
            backward,
        )

    def unary(self, value: Value, saved: str = "") -> Value:
        """Trace an elementwise function, which saves its "input", its "output", or nothing."""
        new, count, width = self.tracer.new, value.count, value.width
        result = new(count, width)
        kept = {"input": [value], "output": [result], "": []}[saved]
        result.source = self.tracer.node([value], kept, lambda gradient: [new(count, width)])
        return result

    def dropped(self, value: Value) -> Value:
        """Trace dropout, which saves a mask of bytes (native_dropout)."""
        new, count, width = self.tracer.new, value.count, value.width
        result = new(count, width)
        result.source = self.tracer.node([value], [new(count, 1)], lambda gradient: [new(count, width)])
        return result

    def cast(self, value: Value, width: float) -> Value:
        """Trace a copy in another width; return the value itself if it has that width."""
        if value.width == width:
            return value
        new, count, before = self.tracer.new, value.count, value.width
        return self._result(count, width, [value], [], lambda gradient: [new(count, before)])

    def add(self, first: Value, second: Value) -> Value:
        """Trace a sum; its gradient is passed on to both inputs."""
        return self._result(
            first.count, max(first.width, second.width), [first, second], [], lambda gradient: [gradient, gradient]
        )

    def mul(self, first: Value, second: Value) -> Value:
        """Trace an elementwise product, which saves each factor whose counterpart needs a gradient."""
        return self._product(first, second, max(first.count, second.count), max(first.width, second.width))

    def cat(self, first: Value, second: Value) -> Value:
        """Trace a concatenation of two values; their gradients are views."""
        counts = (first.count, second.count)

        def backward(gradient: Value) -> list[Value]:
            return [Value(gradient.storage, count, gradient.width, None) for count in counts]

        return self._result(sum(counts), first.width, [first, second], [], backward)

    def slice(self, value: Value, share: float) -> Value:
        """Trace a view of a part; its gradient is as large as the whole."""
        new, count, width = self.tracer.new, value.count, value.width
        result = Value(value.storage, count * share, width, None)
        result.source = self.tracer.node([value], [], lambda gradient: [new(count, width)])
        return result

    def split(self, value: Value, share: float) -> tuple[Value, Value]:
        """Trace views of two parts, `share` of a value and the rest; their gradients are concatenated."""
        whole, total, width = self.view(value), value.count, value.width

        def backward(gradient: Value) -> list[Value]:
            # The tracer adds both parts' gradients into a new value, of the size that concatenation allocates.
            return [Value(gradient.storage, total, width, None)]

        parts = Value(value.storage, total * share, width, None), Value(value.storage, total * (1 - share), width, None)
        for part in parts:
            part.source = self.tracer.node([whole], [], backward)
        return parts

    def matmul(self, first: Value, second: Value, count: float) -> Value:
        """Trace a matrix product of `count` elements, which saves each factor whose counterpart needs a gradient."""
        return self._product(first, second, count, first.width)

    def _product(self, first: Value, second: Value, count: float, width: float) -> Value:
        new = self.tracer.new
        saved = [other for one, other in ((first, second), (second, first)) if one.needs_gradient]
        shapes = [(one.count, one.width, one.needs_gradient) for one in (first, second)]
        return self._result(
            count,
            width,
            [first, second],
            saved,
            lambda gradient: [new(size, width) if needed else None for size, width, needed in shapes],
        )

    def repeat(self, value: Value, times: float) -> Value:
        """Trace a copy of each head `times`; the gradients are summed."""
        if times == 1:
            return value
        new, count, width = self.tracer.new, value.count, value.width
        return self._result(count * times, width, [value], [], lambda gradient: [new(count, width)])
