"""The trace of B·A for the memory estimate."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerolora.model.projections import Projections
    from zerolora.model.spec import Module
    from zerolora.model.tracer import Value


def factors(layer: "Projections", value: "Value", module: "Module", r: int) -> "Value":
    """Trace B(A(x))."""
    first = layer.adapter_weight(module.inputs * r)
    second = layer.adapter_weight(module.outputs * r)
    return layer.linear(layer.linear(value, module.inputs, r, first), r, module.outputs, second)
