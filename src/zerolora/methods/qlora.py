"""QLoRA (arXiv 2305.14314): LoRA on a base model whose linear modules, and stacked experts, are quantized."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from zerolora.compat.transformers_patches import quantizable_paths
from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.config.section import Fault
from zerolora.errors import UserError
from zerolora.methods.lora import TrainedLowRank
from zerolora.methods.low_rank_trace import factors
from zerolora.model.architecture import stacked_experts

if TYPE_CHECKING:
    from zerolora.config.method_sections import MethodSections
    from zerolora.model.projections import Projections
    from zerolora.model.spec import ModelSpec, Module
    from zerolora.model.tracer import Value

# bitsandbytes: an fp32 absmax per block; double quantization stores those as int8 with an fp32 per second block, a
# mean, and a table of 256 numbers (QLoRA section 3, bitsandbytes/functional.py quantize_4bit).
BLOCK, SECOND_BLOCK = 64, 256
LIFTED = 4  # bytes of a weight that peft lifts to fp32


@dataclass(frozen=True)
class QloraMethod(TrainedLowRank):
    """QLoRA."""

    name: ClassVar[str] = "qlora"
    sections: ClassVar[tuple[str, ...]] = ("lora", "quantization")

    quantization: Literal["nf4", "fp4", "int8"] = "nf4"
    """Type of a weight; both 4-bit types take the same memory."""
    double_quantization: bool = True
    """Whether the constants of the first quantization are quantized too."""
    quantization_block: int = BLOCK
    """Weights of one quantization constant."""
    prepared_by: Literal["zerolora", "peft"] = "zerolora"
    """zerolora: unquantized weights (embeddings, head, norms) stay in the run's precision. peft: they are lifted to
    fp32, and so are activations (peft/utils/other.py, prepare_model_for_kbit_training)."""

    @classmethod
    def faults(cls, settings: "MethodSections") -> Iterator[Fault]:
        """Yield an init that would change the quantized weights."""
        if settings.lora.init != DEFAULT_INIT:
            text = f"{settings.lora.init} with method {cls.name}, which cannot change quantized weights"
            yield ("lora", "init"), f"{text}; use {DEFAULT_INIT}"

    def under(self, engine: str) -> "QloraMethod":
        """Return the method under an engine: DeepSpeed casts every weight to its precision
        (deepspeed/runtime/engine.py, _configure_distributed_model), lifted or not."""
        return replace(self, prepared_by="zerolora") if engine == "deepspeed" else self

    def activation_width(self, width: int) -> int:
        """Return the bytes of an activation: results of embedding and norms have their weights' width, and those of
        4-bit modules their input's."""
        return LIFTED if self.prepared_by == "peft" else width

    @property
    def frozen_type(self) -> str | None:
        """The type of a quantized weight."""
        return self.quantization

    @property
    def reads_whole(self) -> bool:
        """Whether the type is int8, whose weights no engine shards."""
        return self.quantization == "int8"

    @property
    def in_four_bits(self) -> bool:
        """Whether the type has 4 bits, in which stacked experts are quantized too (train/quantized_experts.py)."""
        return self.quantization != "int8"

    @property
    def unpacks_experts(self) -> bool:
        """True in 4 bits: in their forward pass."""
        return self.in_four_bits

    @classmethod
    def of(cls, settings: "MethodSections") -> Self:
        quantization = settings.quantization
        return replace(super().of(settings), quantization=quantization.type, double_quantization=quantization.double)

    @classmethod
    def build(cls, model: Any, settings: "MethodSections", rows: Sequence[int] = ()) -> Any:
        if ends := tuple(settings.lora.modules_to_save):
            # Submodules of a saved module are saved too.
            parts = [*quantizable_paths(model), *(stacked_experts(model) if cls.of(settings).in_four_bits else ())]
            inside = [path for name, _ in model.named_modules() if name.endswith(ends) for path in _within(name, parts)]
            cls._check_not_saved(inside)
        return super().build(model, settings, rows)

    def adapted(self, model: "ModelSpec") -> tuple[list[int], int, dict[str, int]]:
        if ends := self.modules_to_save:
            saved = [module for module in model.linears if module.quantizable and module.path.endswith(ends)]
            self._check_not_saved([module.path.format(module.numbers[0]) for module in saved])
        return super().adapted(model)

    @classmethod
    def _check_not_saved(cls, paths: list[str]) -> None:
        """Raise UserError for quantized modules, `paths`, in modules_to_save: quantized weights have no gradient."""
        if paths:
            raise UserError(
                f"train.lora.modules_to_save: {paths[0]} is quantized with method: {cls.name}, and cannot be trained "
                f"as a whole; leave it out, or set method: {cls.name.removeprefix('q')}"
            )

    def frozen_bytes(self, model: "ModelSpec", width: int) -> float:
        """Return the bytes of the base model: quantized linear modules and experts, other weights of `width` bytes or
        fp32."""
        width = self.activation_width(width)
        quantized = self.replaced(model)
        return model.parameters * width + quantized * (self._bytes_of_a_weight() - width) + self.constants(model)

    def constants(self, model: "ModelSpec") -> float:
        """Return the bytes of the quantization constants: of 4-bit types by block, of int8 by output."""
        if self.quantization == "int8":
            return 4.0 * sum(each.outputs * each.count for each in _quantized(model))
        if not self.double_quantization:
            return self.replaced(model) * 4 / self.quantization_block
        return self.replaced(model) * (1 / self.quantization_block + 4 / (self.quantization_block * SECOND_BLOCK))

    def _of_experts(self, module: "Module") -> int:
        """Return the quantized parameters of one layer's experts."""
        stacked = (shape for _, shape in module.weights if len(shape) == 3)
        return sum(map(math.prod, stacked)) if module.kind == "experts" and self.in_four_bits else 0

    def packed(self, module: "Module", width: int) -> float:
        """Return a module's weights as a number of weights of `width` bytes, without constants."""
        weight = self._of_experts(module)
        if module.quantizable and module.inputs and module.kind in ("linear", "conv1d", "outside"):
            weight = module.inputs * module.outputs
        return module.parameters - weight * (1 - self._bytes_of_a_weight() / width)

    def replaced(self, model: "ModelSpec") -> int:
        """Return the parameters that are quantized."""
        linear = sum(module.inputs * module.outputs * module.count for module in _quantized(model))
        return linear + sum(self._of_experts(module) * module.count for module in model.modules)

    def _bytes_of_a_weight(self) -> float:
        """Return the bytes of one quantized weight without constants."""
        return 1.0 if self.quantization == "int8" else 0.5

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a quantized module with its adapter (peft/tuners/lora/bnb.py)."""
        result = self.base(layer, module, value)
        r = layer.ranks.get(module.path, 0)
        if not r:
            return result
        before = result.width
        value = self.dropped_input(layer, value)
        update = layer.unary(factors(layer, value, module, r))
        # Unlike LoRA's, the sum has the result's width.
        return layer.cast(layer.add(result, layer.cast(update, before)), before)

    def base(self, layer: "Projections", module: "Module", value: "Value") -> "Value":
        """Trace the quantized module; an adapted 4-bit one clones its result (peft/tuners/lora/bnb.py)."""
        if self.quantization == "int8":
            return _in_8_bits(layer, module, value)
        result = _unpacked(layer, module, value)
        return layer.unary(result) if layer.ranks.get(module.path) else result


def _quantized(model: "ModelSpec") -> "list[Module]":
    """Return the modules that transformers quantizes: linear ones but the output head, also in a vision tower."""
    outside = (module for module in model.modules if module.kind == "outside" and module.inputs)
    return [module for module in (*model.linears, *outside) if module.quantizable]


def _within(name: str, paths: list[str]) -> list[str]:
    """Return the paths of a module and of its submodules."""
    return [path for path in paths if path == name or path.startswith(f"{name}.")]


def _unpacked(layer: "Projections", module: "Module", value: "Value") -> "Value":
    """Trace a 4-bit module: its weight is unpacked during each product, forward and backward.

    It computes in the run's precision, and its result has the input's width (bitsandbytes/nn/modules.py, Linear4bit).
    """
    before = value.width
    value = layer.cast(value, layer.step.weight_width or before)
    new, count, width = layer.tracer.new, value.count, value.width
    unpacked = new(module.inputs * module.outputs, width)
    result = new(count / module.inputs * module.outputs, width)
    del unpacked

    def backward(gradient: "Value") -> "list[Value]":
        again = new(module.inputs * module.outputs, width)
        values = [new(count, width)]
        del again
        return values

    result.source = layer.tracer.node([value], [], backward)
    del value
    return layer.cast(result, before)


def _in_8_bits(layer: "Projections", module: "Module", value: "Value") -> "Value":
    """Trace an int8 module: CUDA multiplies in int8, a CPU unpacks the weight; both unpack it in the backward pass.
    Columns of outliers are few and not counted.

    The input is an attribute of the node, not a saved tensor, so it is freed with the whole graph
    (bitsandbytes/autograd/_functions.py, MatMul8bitLt and MatMul8bitFp; backends/default/ops.py, int8_scaled_mm).
    """
    new, count, width = layer.tracer.new, value.count, value.width
    weights, outputs = module.inputs * module.outputs, count / module.inputs * module.outputs
    if layer.step.on_cpu:
        during = [new(weights, width)]
    else:
        narrow = None if layer.step.half else new(count, 2)
        codes = new(count, 1)
        del narrow
        during = [codes, new(outputs, 4), *(() if layer.step.half else (new(outputs, 2),))]
    result = new(outputs, width)
    del during
    kept = [value.storage]

    def backward(gradient: "Value") -> "list[Value]":
        assert kept
        unpacked = new(weights, width)
        values = [new(count, width)]
        del unpacked
        return values

    result.source = layer.tracer.node([value], [], backward)
    return result
