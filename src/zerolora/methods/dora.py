"""DoRA (arXiv 2402.09353): LoRA with a trained magnitude for each output. Estimated only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from zerolora.methods.lora import LowRank, factors

if TYPE_CHECKING:
    from zerolora.memory.model_spec import Module
    from zerolora.memory.projections import Projections
    from zerolora.memory.tracer import Value


@dataclass(frozen=True)
class DoraMethod(LowRank):
    """DoRA."""

    name: ClassVar[str] = "dora"

    def tensors(self, module: "Module", r: int) -> list[int]:
        """Return the elements of the two factors and of the magnitudes."""
        first, second = super().tensors(module, r)
        return [first, second, second // r]

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a module whose update is multiplied with a unit matrix for the norms (peft/tuners/lora/dora.py)."""
        result = layer.frozen(value, module)
        r = layer.ranks.get(module.path, 0)
        if not r:
            return result
        new, width, before, model_width = layer.tracer.new, layer.trained.width, result.width, layer.step.width
        value = self.dropped_input(layer, value)
        if self.drops:
            # The input after dropout is multiplied again with the whole weight, in the adapter's width.
            whole = new(module.inputs * module.outputs, width if width != model_width else 0)
            base = layer.matmul(value, whole, value.count / module.inputs * module.outputs)
        else:
            base = result
        unit = new(module.inputs**2, width)
        weight = factors(layer, unit, module, r)
        unpacked = new(weight.count, width) if width != model_width else None
        scaled = new(weight.count, width)
        total = new(weight.count, width)
        square = new(weight.count, width)
        del scaled, total, square, unpacked, unit
        magnitude = layer.of(layer.adapter_weight(module.outputs))
        update = factors(layer, value, module, r)
        kept = layer.mul(layer.broadcast(magnitude, base), base)
        change = layer.add(kept, layer.unary(layer.mul(layer.broadcast(magnitude, base), update)))
        del kept, weight, base
        return layer.cast(layer.add(result, change), before)
