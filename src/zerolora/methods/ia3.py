"""(IA)³ (arXiv 2205.05638): a trained vector for each key, value and MLP module. Estimated only.

Sources: peft/tuners/ia3/model.py and layer.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from zerolora.methods.base import ADAPTABLE, Method, TrainedParameters, is_named, named_modules, saved_tensors

if TYPE_CHECKING:
    from zerolora.memory.model_spec import ModelSpec, Module
    from zerolora.memory.projections import Projections
    from zerolora.memory.tracer import Value

# peft/utils/constants.py, TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING: keys, values, and the MLP's last module.
TARGETS = ("k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn", "k", "v")
FEEDFORWARD = ("down_proj", "dense_4h_to_h", "mlp.c_proj", "fc2", "wo")


@dataclass(frozen=True)
class Ia3Method(Method):
    """(IA)³."""

    name: ClassVar[str] = "ia3"

    targets: str | tuple[str, ...] = "all-linear"
    """all-linear for those that peft takes by default, or names or ends of paths of modules."""
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a whole copy is trained and saved."""

    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return the vectors as trained, the base model as frozen."""
        adapted = self._targets(model)
        # A feed-forward module's input is rescaled, another module's output.
        tensors = [
            module.inputs if module.path.endswith(FEEDFORWARD) else module.outputs
            for module in adapted
            for _ in range(module.count)
        ]
        tensors += saved_tensors(model, self.modules_to_save)
        ranks = tuple((module.path, 1) for module in adapted)
        return TrainedParameters(model.parameters, sum(tensors), float(model.parameters * width), ranks, max(tensors))

    def _targets(self, model: "ModelSpec") -> "list[Module]":
        if self.targets == "all-linear":
            return [each for each in model.linears if each.path.endswith(FEEDFORWARD) or is_named(each, TARGETS)]
        names = (self.targets,) if isinstance(self.targets, str) else self.targets
        adaptable = [module for module in model.modules if module.kind in ADAPTABLE]
        return named_modules(model, names, "train.lora.targets", adaptable)

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace the input of the MLP's last module, or another module's result, times a vector."""
        if module.path not in layer.ranks:
            return layer.frozen(value, module)
        width, before = layer.trained.width, value.width
        vector = layer.of(layer.adapter_weight(module.outputs))
        if role != "down":
            result = layer.frozen(value, module)
            return layer.cast(layer.mul(result, layer.broadcast(vector, result)), before)
        value = layer.cast(value, width)
        return layer.frozen(layer.cast(layer.mul(value, vector), before), module)
