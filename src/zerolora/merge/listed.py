"""The weights of a base model as its config.json lists them, where its files call them so: without transformers.

Building the class takes transformers' import and some seconds. The families of model/families/ are listed without it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.methods.adapter_config import OTHER_PRODUCTS
from zerolora.methods.peft_format import CONFIG
from zerolora.methods.token_rows import INDICES
from zerolora.model import added_tokens, foreign
from zerolora.model.base_check import listed_spec
from zerolora.model.spec import ModelSpec
from zerolora.tensor_file import TensorFile

ASKING = (
    *("target_parameters", INDICES, "layers_to_transform", "layers_pattern", "ensure_weight_tying", "lora_bias"),
    *OTHER_PRODUCTS,
)
"""Keys of an adapter's config whose tensors only the built class knows: parameters of experts, tied rows, and what is
rare."""


@dataclass(frozen=True)
class ListedNames:
    """The names of weights that are called in their files as in the model."""

    shapes: Mapping[str, tuple[int, ...]]

    def of_model(self, stored: str) -> tuple[str, bool]:
        """Return the weight that a stored tensor is, and that it is not converted."""
        return stored, False

    def converted(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the weights that are stored, which are the tensors themselves."""
        return stored

    def stored(self, weights: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Return the tensors of weights, which are the weights themselves."""
        return {name: weights[name] for name in names}


def listed_model(base: Path, files: Iterable[TensorFile], adapters: Sequence[Path]) -> ModelSpec | None:
    """Return the spec of a base whose files hold exactly the weights that it lists, in these shapes.

    None if they hold others, the architecture is in no file of model/families/, or an adapter changes what only the
    built class tells.
    """
    for adapter in adapters:
        if not (adapter / CONFIG).is_file() or (adapter / added_tokens.FILE).is_file():
            return None
        config = foreign.adapter_config(adapter)
        rare = any(config.get(key) for key in ASKING) or config.get("bias", "none") != "none"
        if rare or config.get("target_modules") in (None, "all-linear"):
            return None
    return listed_spec(base, files)
