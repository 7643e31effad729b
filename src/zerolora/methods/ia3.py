"""(IA)³ (arXiv 2205.05638): a trained vector for each key, value and MLP module.

Sources: peft/tuners/ia3/model.py and layer.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from zerolora.errors import UserError
from zerolora.methods.adapter_check import ImpliedShapes
from zerolora.methods.adapter_config import is_feedforward
from zerolora.methods.method import (
    ADAPTABLE,
    TrainedParameters,
    Update,
    check_shape,
    named_modules,
    saved_factors,
    saved_tensors,
)
from zerolora.methods.peft_format import (
    PREFIX,
    check_names,
    conv1d_paths,
    excluded,
    peft_model,
    saved_name,
)
from zerolora.methods.peft_method import PeftMethod
from zerolora.methods.updates import Replacement
from zerolora.tensor_file import whole

if TYPE_CHECKING:
    import torch

    from zerolora.config.method_sections import MethodSections
    from zerolora.model.projections import Projections
    from zerolora.model.spec import ModelSpec, Module
    from zerolora.model.tracer import Value
    from zerolora.tensor_file import Factor

# peft/utils/constants.py, TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING: keys, values, and the MLP's last module.
TARGETS = ("k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn", "k", "v")
SUFFIX = ".ia3_l"
NO_DEFAULT = (
    "train.ia3.targets: this model names its keys, values and MLP in another way; use a list of names of its linear "
    "modules"
)
FEEDFORWARD = ("down_proj", "dense_4h_to_h", "mlp.c_proj", "fc2", "wo")


def _shapes(
    config: Mapping[str, Any], model: "ModelSpec", module: "Module", path: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the tensor of a module."""
    yield "ia3_l", (1, module.inputs) if is_feedforward(config, path) else (module.outputs, 1)


@dataclass(frozen=True)
class Ia3Method(PeftMethod):
    """(IA)³."""

    name: ClassVar[str] = "ia3"
    rate: ClassVar[float] = 10.0  # 3e-3 in arXiv 2205.05638
    sections: ClassVar[tuple[str, ...]] = ("ia3",)
    peft_type: ClassVar[str | None] = "IA3"
    trains_rows: ClassVar[bool] = False
    shapes: ClassVar[ImpliedShapes] = ImpliedShapes(_shapes)

    targets: str | tuple[str, ...] = "all-linear"
    """Names or ends of paths of modules; all-linear means the paper's: keys, values, the MLP's last."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained and saved in full."""

    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return the vectors as trained, the base model as frozen."""
        adapted = self._targets(model)
        # The input of a feed-forward module is scaled, and the output of others.
        tensors = [
            module.inputs if module.path.endswith(FEEDFORWARD) else module.outputs
            for module in adapted
            for _ in range(module.count)
        ]
        # Of shape [1, inputs] or [outputs, 1].
        factored = sum(size + 1 for size in tensors) + saved_factors(model, self.modules_to_save)
        tensors += saved_tensors(model, self.modules_to_save)
        ranks = tuple((module.path, 1) for module in adapted)
        frozen_bytes = float(model.parameters * width)
        return TrainedParameters(model.parameters, sum(tensors), frozen_bytes, ranks, max(tensors), factored)

    def _targets(self, model: "ModelSpec") -> "list[Module]":
        if self.targets == "all-linear":
            ends = tuple(f".{end}" for end in (*TARGETS, *FEEDFORWARD))
            if result := [each for each in model.linears if each.path.endswith(ends)]:
                return result
            raise UserError(NO_DEFAULT)
        names = (self.targets,) if isinstance(self.targets, str) else self.targets
        adaptable = [module for module in model.modules if module.kind in ADAPTABLE]
        return named_modules(model, names, "train.ia3.targets", adaptable)

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a vector times the input of the MLP's last module, or times the result of others."""
        if module.path not in layer.ranks:
            return layer.frozen(value, module)
        width, before = layer.trained.width, value.width
        vector = layer.of(layer.adapter_weight(module.outputs))
        if role != "down":
            result = layer.frozen(value, module)
            return layer.cast(layer.mul(result, layer.broadcast(vector, result)), before)
        value = layer.cast(value, width)
        return layer.frozen(layer.cast(layer.mul(value, vector), before), module)

    @classmethod
    def of(cls, settings: "MethodSections") -> Self:
        ia3 = settings.ia3
        targets = ia3.targets if isinstance(ia3.targets, str) else tuple(ia3.targets)
        return cls(targets="all-linear" if targets == "auto" else targets, modules_to_save=tuple(ia3.modules_to_save))

    @staticmethod
    def build(model: Any, settings: "MethodSections", rows: Sequence[int] = ()) -> Any:
        from peft import IA3Config

        assert not rows, "config/run_checks.py refuses added tokens with ia3"

        ia3 = settings.ia3
        targets = default_targets(model) if isinstance(ia3.targets, str) else list(ia3.targets)
        config = IA3Config(
            task_type="CAUSAL_LM",
            target_modules=targets,
            feedforward_modules=[name for name in targets if name.endswith(FEEDFORWARD)],
            exclude_modules=excluded(model),
            modules_to_save=list(ia3.modules_to_save) or None,
        )
        wrapped = peft_model(model, config, "train.ia3", targets)
        check_names(wrapped, "train.ia3", targets, ia3.modules_to_save)
        return wrapped

    @staticmethod
    def is_untrained(name: str, tensor: "torch.Tensor") -> bool:
        return name.endswith(SUFFIX) and bool((tensor == 1).all())

    @staticmethod
    def updates_of(tensors: "Mapping[str, Factor]", config: dict[str, Any], model: Any) -> dict[str, Update]:
        """Return the update of each weight and bias that an adapter scales."""
        transposed = conv1d_paths(model)
        result: dict[str, Update] = {}
        for name, tensor in tensors.items():
            module = name.removeprefix(PREFIX).removesuffix(SUFFIX)
            if not name.endswith(SUFFIX):
                result[saved_name(name)] = Replacement(saved_name(name), tensor)
                continue
            vector = whole(tensor)
            turned = vector.T if module in transposed else vector
            result[f"{module}.weight"] = Scaled(f"{module}.weight", turned)
            if not is_feedforward(config, module):
                result[f"{module}.bias"] = Scaled(f"{module}.bias", vector.flatten(), optional=True)
        return result


@dataclass(frozen=True)
class Scaled(Update):
    """A weight or bias times a trained vector."""

    name: str
    vector: "torch.Tensor"
    """[outputs, 1] or [1, inputs] for a weight, [outputs] for a bias; of a Conv1D transposed."""
    optional: bool = False
    """A bias, which not every module has."""

    def check(self, shape: tuple[int, ...]) -> None:
        expected = [given if own == 1 else own for own, given in zip(self.vector.shape, shape, strict=True)]
        check_shape(self.name, shape, expected)

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        one_for_all = self.vector.shape[0] == 1
        rows.mul_((self.vector if one_for_all else self.vector[first : first + len(rows)]).float())


def default_targets(model: Any) -> list[str]:
    """Return the names of the paper's modules in a model. Raises UserError if there are none."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    ends = [end for end in (*TARGETS, *FEEDFORWARD) if any(name.endswith(f".{end}") for name in linear)]
    if ends:
        return ends
    raise UserError(NO_DEFAULT)
