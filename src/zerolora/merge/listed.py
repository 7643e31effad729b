"""The weights of a base model from its config.json alone, if its files use the model's names.

Importing transformers and building the model's class takes seconds; the families of model/families/ need neither.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolora.methods.adapter_config import OTHER_PRODUCTS
from zerolora.methods.peft_format import CONFIG, read_config
from zerolora.methods.token_rows import INDICES
from zerolora.model import added_tokens
from zerolora.model.base_check import listed_spec
from zerolora.model.spec import ModelSpec
from zerolora.tensor_file import TensorFile

NEEDS_CLASS = (
    *("target_parameters", INDICES, "layers_to_transform", "layers_pattern", "ensure_weight_tying", "lora_bias"),
    *OTHER_PRODUCTS,
)
"""Keys of an adapter's config whose tensors only the built class has: expert parameters, tied rows, rare options."""


@dataclass(frozen=True)
class ListedNames:
    """Names of weights that are the same in the files as in the model."""

    shapes: Mapping[str, tuple[int, ...]]

    def of_model(self, stored: str) -> tuple[str, bool]:
        """Return the weight of a stored tensor, and False: it needs no conversion."""
        return stored, False

    def converted(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return stored tensors, which are the weights."""
        return stored

    def stored(self, weights: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Return the weights of these names, which are the tensors."""
        return {name: weights[name] for name in names}


def listed_model(base: Path, files: Iterable[TensorFile], adapters: Sequence[Path]) -> ModelSpec | None:
    """Return the spec of a base whose files have exactly the spec's weights and shapes.

    None if they differ, model/families/ has no file for the architecture, or an adapter's updates need the built class.
    """
    for adapter in adapters:
        if not (adapter / CONFIG).is_file() or (adapter / added_tokens.FILE).is_file():
            return None
        config = read_config(adapter)
        rare = any(config.get(key) for key in NEEDS_CLASS) or config.get("bias", "none") != "none"
        if rare or config.get("target_modules") in (None, "all-linear"):
            return None
    return listed_spec(base, files)
