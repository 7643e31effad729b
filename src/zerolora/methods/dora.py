"""DoRA (arXiv 2402.09353): LoRA with a trained magnitude for each output."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.errors import UserError
from zerolora.methods.experts import AdaptedParameter
from zerolora.methods.lora import TrainedLowRank
from zerolora.methods.low_rank_trace import factors

if TYPE_CHECKING:
    from zerolora.model.projections import Projections
    from zerolora.model.spec import Module
    from zerolora.model.tracer import Value


@dataclass(frozen=True)
class DoraMethod(TrainedLowRank):
    """DoRA."""

    name: ClassVar[str] = "dora"
    quantized_form: ClassVar[str | None] = "qdora"
    options: ClassVar[dict[str, Any]] = {"use_dora": True}

    def tensors(self, module: "Module", r: int) -> list[int]:
        """Return the elements of the two factors and of the magnitudes."""
        first, second = super().tensors(module, r)
        return [first, second, second // r]

    def factored(self, module: "Module", r: int) -> int:
        """Return the rows and columns of the two factors, and the magnitudes."""
        first, second, magnitudes = self.tensors(module, r)
        return 2 * r + first // r + second // r + magnitudes

    def parameter_tensors(self, parameter: AdaptedParameter, r: int) -> list[int]:
        """Raise UserError: peft has no DoRA of a parameter (peft/tuners/lora/layer.py, ParamWrapper)."""
        raise UserError(
            f"train.lora.targets: {parameter.path} is a parameter, for which peft has no DoRA; use targets without "
            "the experts and their router, as in q_proj"
        )

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a module, whose norms need its update times a unit matrix (peft/tuners/lora/dora.py)."""
        result = self.base(layer, module, value)
        r = layer.ranks.get(module.path, 0)
        if not r:
            return result
        new, width, before, model_width = layer.tracer.new, layer.trained.width, result.width, layer.step.width
        value = self.dropped_input(layer, value)
        if self.drops:
            # The input after dropout is multiplied by the whole weight again, in the adapter's width.
            whole = new(module.inputs * module.outputs, width if width != model_width else 0)
            base = layer.matmul(value, whole, value.count / module.inputs * module.outputs)
        else:
            base = result
        unit = new(module.inputs**2, width)
        weight = factors(layer, unit, module, r)
        # The frozen weight for the norms, unpacked from a quantized module, or cast.
        unpacked = new(weight.count, width) if width != model_width or self.frozen_type else None
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
