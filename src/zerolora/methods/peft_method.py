"""What all methods share whose adapters peft builds and saves."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.methods.adapter_check import ImpliedShapes, check_adapter
from zerolora.methods.method import TrainableMethod, Update
from zerolora.methods.peft_format import peft_state, read_adapter

if TYPE_CHECKING:
    import torch

    from zerolora.tensor_file import StoredTensor


class PeftMethod(TrainableMethod):
    """A method whose adapters peft builds and saves."""

    shapes: ClassVar[ImpliedShapes]

    @staticmethod
    def published(model: Any, trained: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        return peft_state(model, trained)

    @staticmethod
    def of_class(
        tensors: "Mapping[str, StoredTensor]", config: dict[str, Any], model: Any
    ) -> "tuple[Mapping[str, StoredTensor], dict[str, Any]]":
        """Return an adapter that was saved for an earlier class of the base as one for this class."""
        return tensors, config

    @classmethod
    def updates(cls, directory: Path, model: Any) -> dict[str, Update]:
        tensors, config = cls.of_class(*read_adapter(directory), model)
        check_adapter(directory, tensors, config, model, cls.shapes)
        return cls.updates_of(tensors, config, model)
