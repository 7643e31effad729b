"""The interface of a training method: trained parameters, their memory, and the trace of the forward pass."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.errors import UserError, shown

if TYPE_CHECKING:
    import torch

    from zerolora.memory.model_spec import ModelSpec, Module
    from zerolora.memory.projections import Projections
    from zerolora.memory.tracer import Value

ADAPTABLE = ("linear", "conv1d", "embedding", "head")


@dataclass(frozen=True)
class TrainedParameters:
    """The frozen and trained parameters of a model."""

    frozen: int
    """Parameters of the base model that stay as they are."""
    trained: int
    """Parameters that are trained: φ."""
    frozen_bytes: float
    """Bytes of the frozen ones, quantized or not, unsharded."""
    ranks: tuple[tuple[str, int], ...]
    """Path and r of each adapted linear module, of the first layer where layers differ; 1 for (IA)³."""
    largest_trained: int
    """Parameters of the largest trained tensor."""


@dataclass(frozen=True)
class Method(ABC):
    """A way to train a model. Its fields are its settings."""

    name: ClassVar[str]
    trains: ClassVar[bool] = False
    """Whether `zerolora train` can run it; otherwise only its memory is estimated."""
    trains_base: ClassVar[bool] = False
    """The base model's own weights are trained."""

    @property
    def drops(self) -> bool:
        """Whether dropout is applied to the adapter's input."""
        return False

    @abstractmethod
    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return what is trained and frozen; `width` is the bytes of a weight that is not quantized.

        Raises UserError if a setting names a module that the model does not have.
        """

    @abstractmethod
    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace a linear module with what the method adds to it; `role` is q, k, v, o, gate, up or down."""


@dataclass(frozen=True)
class TrainableMethod(Method):
    """A method that `zerolora train` can run and `zerolora merge` can merge."""

    trains: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def build(model: Any, settings: Any) -> Any:
        """Return peft's model around a transformers model, with a fresh adapter; `settings` are those of the config.

        Raises UserError if a setting names a module that the model does not have.
        """

    @staticmethod
    @abstractmethod
    def updates(weights: Path, config: dict[str, Any]) -> "dict[str, Update]":
        """Return what an adapter adds to each base weight, by the weight's name.

        `weights` is the adapter's safetensors file in peft's format, `config` its adapter_config.json. Raises UserError
        if a tensor is not of this method.
        """


class Update(ABC):
    """What an adapter adds to one weight."""

    @abstractmethod
    def tensor(self) -> "torch.Tensor":
        """Return it in fp32, in the shape of the weight."""


def named_modules(model: "ModelSpec", names: tuple[str, ...], key: str, among: "Iterable[Module]") -> "list[Module]":
    """Return the modules whose path is, or ends in, one of `names`; `key` is the setting in the error's message."""
    among = list(among)
    for name in names:
        if not any(is_named(module, (name,)) for module in among):
            known = ", ".join(sorted({module.name for module in model.linears}))
            raise UserError(f"{key}: {shown(name)} is not in the model; write all-linear or some of {known}")
    return [module for module in among if is_named(module, names)]


def is_named(module: "Module", names: tuple[str, ...]) -> bool:
    """Return whether a module's path is, or ends in, one of `names`."""
    return any(module.path == name or module.path.endswith(f".{name}") for name in names)


def saved_tensors(model: "ModelSpec", names: tuple[str, ...]) -> list[int]:
    """Return the elements of each parameter of the modules of which a whole copy is trained and saved."""
    tensors: list[int] = []
    for module in named_modules(model, names, "modules_to_save", model.modules) if names else []:
        # A tied head is saved as a tensor of its own.
        tensors += (sizes(module) or [model.vocabulary * model.hidden]) * module.count
    return tensors


def sizes(module: "Module") -> list[int]:
    """Return the elements of each parameter of one copy of a module."""
    return [math.prod(shape) for _, shape in module.weights]
