"""Full fine-tuning: every parameter of the model is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.errors import UserError
from zerolora.methods.adapter_check import check_finite, check_whole
from zerolora.methods.method import (
    WHOLE_WEIGHTS,
    TrainableMethod,
    TrainedParameters,
    Update,
    rows_and_columns,
    sizes,
    without_copies,
)
from zerolora.methods.updates import Replacement
from zerolora.model import foreign
from zerolora.model.architecture import other_parts
from zerolora.tensor_file import read_header

if TYPE_CHECKING:
    import torch

    from zerolora.config.method_sections import MethodSections
    from zerolora.model.projections import Projections
    from zerolora.model.spec import ModelSpec, Module
    from zerolora.model.tracer import Value
    from zerolora.tensor_file import Factor


@dataclass(frozen=True)
class FullMethod(TrainableMethod):
    """Full fine-tuning."""

    name: ClassVar[str] = "full"
    # The best rate of LoRA is ten times as high (Schulman et al., LoRA Without Regret, Thinking Machines, 2025).
    rate: ClassVar[float] = 0.1
    trains_base: ClassVar[bool] = True

    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return all parameters of the language model as trained ones."""
        trained = [module for module in model.modules if module.kind != "outside"]
        frozen = sum(module.parameters * module.count for module in model.modules if module.kind == "outside")
        largest = max(size for module in trained for size in sizes(module))
        shapes = [(shape, module.count) for module in trained for _, shape in module.weights]
        factored = sum(rows_and_columns(shape) * count for shape, count in shapes)
        return TrainedParameters(frozen, model.parameters - frozen, float(frozen * width), (), largest, factored)

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a linear module whose weight is trained."""
        return layer.linear(value, module.inputs, module.outputs, layer.trained_weight(module.parameters))

    @staticmethod
    def build(model: Any, settings: "MethodSections", rows: Sequence[int] = ()) -> Any:
        """Return the model with all weights of the language model trainable, including `rows`."""
        parts = tuple(f"{part}." for part in other_parts(model))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(parts))
        return model

    @classmethod
    def fits_listed(cls, settings: "MethodSections", model: "ModelSpec") -> bool:
        """Return True: the files contain every weight that the spec lists."""
        return True

    @staticmethod
    def published(model: Any, trained: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Return the weights, each once: a tied head has none."""
        return trained

    @staticmethod
    def is_untrained(name: str, tensor: "torch.Tensor") -> bool:
        """Return False: a weight starts as the base model's."""
        return False

    @staticmethod
    def updates(directory: Path, model: Any) -> dict[str, Update]:
        """Return the trained weights as replacements of the base model's. Raises UserError unless they are those of
        `model`, each once, with finite numbers."""
        path = directory / WHOLE_WEIGHTS
        tensors = read_header(path).tensors
        check_whole(path, tensors)
        tensors = without_copies(path, tensors, model.all_tied_weights_keys)
        untrained = foreign.adapter_manifest(directory).get("untrained", [])
        _check(path, {name: each.shape for name, each in tensors.items()}, model, untrained)
        check_finite(path, tensors)
        return FullMethod.updates_of(tensors, {}, model)

    @staticmethod
    def updates_of(tensors: "Mapping[str, Factor]", config: dict[str, Any], model: Any) -> dict[str, Update]:
        """Return a replacement of each weight, and of each copy of a shared weight."""
        result: dict[str, Update] = {name: Replacement(name, tensor) for name, tensor in tensors.items()}
        for copy, name in model.all_tied_weights_keys.items():
            # A checkpoint may contain the shared weight twice; transformers ties the two only if they are equal.
            if copy not in tensors and name in tensors:
                result[copy] = Replacement(copy, tensors[name], optional=True)
        return result


def _check(path: Path, shapes: Mapping[str, tuple[int, ...]], model: Any, untrained: Sequence[str]) -> None:
    """Raise UserError, naming the file `path`, unless these shapes are those of the trainable weights of `model`, but
    for those that no gradient reached (`untrained`), which stay the base's."""
    parts = tuple(f"{part}." for part in other_parts(model))
    needed = {name: tuple(each.shape) for name, each in model.named_parameters() if not name.startswith(parts)}
    faults = [f"{name} is missing" for name in needed if name not in shapes and name not in untrained]
    faults += [f"{name} is not a trained weight of the base" for name in shapes if name not in needed]
    faults += [
        f"{name} is {list(shapes[name])}, and {list(shape)} in the base"
        for name, shape in needed.items()
        if name in shapes and shapes[name] != shape
    ]
    if faults:
        more = f" (and {len(faults) - 1} more such)" if len(faults) > 1 else ""
        raise UserError(f"{path}: {faults[0]}{more}; use the base that these weights were trained from")
