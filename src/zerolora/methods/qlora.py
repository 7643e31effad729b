"""QLoRA (arXiv 2305.14314): LoRA on a base model whose linear modules are quantized to 4 bits. Estimated only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from zerolora.methods.lora import LowRank, factors

if TYPE_CHECKING:
    from zerolora.memory.model_spec import ModelSpec, Module
    from zerolora.memory.projections import Projections
    from zerolora.memory.tracer import Value

# bitsandbytes: one absmax a block in fp32; double quantization keeps those as int8 with an fp32 a second block, a
# mean, and their table of 256 numbers (QLoRA section 3, bitsandbytes/functional.py quantize_4bit).
BLOCK, SECOND_BLOCK = 64, 256


@dataclass(frozen=True)
class QloraMethod(LowRank):
    """QLoRA."""

    name: ClassVar[str] = "qlora"

    quantization: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit type; both take the same memory."""
    double_quantization: bool = True
    """The constants of the first quantization are quantized too."""
    quantization_block: int = BLOCK
    """Weights of one quantization constant."""

    def frozen_bytes(self, model: "ModelSpec", width: int) -> float:
        """Return the bytes of the base model, its linear modules in 4 bits and the rest in `width` bytes a weight."""
        quantized = sum(module.inputs * module.outputs * module.count for module in model.linears)
        return model.parameters * width + quantized * (self._bytes_of_a_weight() - width)

    def _bytes_of_a_weight(self) -> float:
        """Return the bytes of one 4-bit weight with its share of the constants."""
        if not self.double_quantization:
            return 0.5 + 4 / self.quantization_block
        return 0.5 + 1 / self.quantization_block + 4 / (self.quantization_block * SECOND_BLOCK)

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a 4-bit module with its adapter (peft/tuners/lora/bnb.py)."""
        result = _unpacked(layer, module, value)
        r = layer.ranks.get(module.path, 0)
        if not r:
            return result
        result = layer.unary(result)  # bnb.py clones it
        before = result.width
        value = self.dropped_input(layer, value)
        update = layer.unary(factors(layer, value, module, r))
        # Unlike LoRA's, the sum is in the result's width.
        return layer.cast(layer.add(result, layer.cast(update, before)), before)


def _unpacked(layer: "Projections", module: "Module", value: "Value") -> "Value":
    """Trace a 4-bit module: its weight is unpacked for as long as it is multiplied, forward and backward."""
    new, count, width = layer.tracer.new, value.count, value.width
    unpacked = new(module.inputs * module.outputs, width)
    result = new(count / module.inputs * module.outputs, width)
    del unpacked

    def backward(gradient: "Value") -> "list[Value]":
        again = new(module.inputs * module.outputs, width)
        found = [new(count, width)]
        del again
        return found

    result.source = layer.tracer.node([value], [], backward)
    return result
