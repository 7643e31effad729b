"""Traces of B·A for the memory estimate: of a module's input, or of an adapted parameter."""

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


def of_parameter(layer: "Projections", module: "Module", value: "Value", r: int) -> "Value":
    """Trace a linear module whose weight is adapted as a parameter: B·A, and its sum with the weight, which is saved
    for the backward pass (peft/tuners/lora/layer.py, ParamWrapper and _LoraParameterProxy)."""
    new, count, width = layer.tracer.new, value.count, value.width
    size = module.inputs * module.outputs
    pair = layer.cast(layer.of(layer.adapter_weight(r * (module.inputs + module.outputs))), width)
    small = pair.count
    product, total = new(size, width), new(size, width)
    total.source = layer.tracer.node([pair], [pair], lambda gradient: [new(small, width)])
    result = new(count / module.inputs * module.outputs, width)
    result.source = layer.tracer.node(
        [value, total], [value, total], lambda gradient: [new(count, width), new(size, width)]
    )
    del product
    return result
