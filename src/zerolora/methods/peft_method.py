"""What all methods share whose adapters peft builds and saves."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.methods.adapter_check import ImpliedShapes, check_adapter
from zerolora.methods.method import TrainableMethod, Update
from zerolora.methods.peft_format import peft_state, read_adapter

if TYPE_CHECKING:
    import torch


class PeftMethod(TrainableMethod):
    """A method whose adapters peft builds and saves."""

    shapes: ClassVar[ImpliedShapes]

    @staticmethod
    def published(model: Any, trained: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        return peft_state(model, trained)

    @classmethod
    def updates(cls, directory: Path, model: Any) -> dict[str, Update]:
        tensors, config = read_adapter(directory)
        check_adapter(directory, tensors, config, model, cls.shapes)
        return cls.updates_of(tensors, config, model)
