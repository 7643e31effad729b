"""Full fine-tuning: every parameter of the model is trained. Estimated only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from zerolora.methods.base import Method, TrainedParameters, sizes

if TYPE_CHECKING:
    from zerolora.memory.model_spec import ModelSpec, Module
    from zerolora.memory.projections import Projections
    from zerolora.memory.tracer import Value


@dataclass(frozen=True)
class FullMethod(Method):
    """Full fine-tuning."""

    name: ClassVar[str] = "full"
    trains_base: ClassVar[bool] = True

    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return all parameters as trained ones."""
        largest = max(size for module in model.modules for size in sizes(module))
        return TrainedParameters(0, model.parameters, 0.0, (), largest)

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a linear module whose weight is trained."""
        return layer.linear(value, module.inputs, module.outputs, layer.trained_weight(module.parameters))
