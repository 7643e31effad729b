"""Which weights of a model are one and the same: embedding and head, in most small models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.errors import UserError
from zerolora.model.spec import ModelSpec
from zerolora.tensor_file import StoredTensor, equal


def tied_weights(model: Any) -> dict[str, str]:
    """Return the name of the weight that each shared copy is, by the copy's name: that of the head, mostly.

    `model` is on the meta device, or a spec.
    """
    if not isinstance(model, ModelSpec):
        return dict(model.all_tied_weights_keys)
    if not model.tied:
        return {}
    head = next(each for each in model.modules if each.kind == "head")
    tables = (each for each in model.modules if each.kind == "embedding")
    found = [each for each in tables if dict(each.weights)["weight"] == (model.vocabulary, head.inputs)]
    return {f"{head.path}.weight": f"{found[0].path}.weight"} if found else {}


def without_copies(path: Path, tensors: Mapping[str, StoredTensor], tied: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Return the tensors of the file `path` without second ones of a weight that the model shares, which other tools
    store; `tied` has the weight's name by the copy's. Raises UserError if the two differ."""
    for copy, name in tied.items():
        if copy in tensors and name in tensors and not equal(tensors[copy], tensors[name]):
            raise UserError(
                f"{path}: {copy} and {name} differ, and the base shares one weight between them; save the weights with "
                "one of them, or write a base with tie_word_embeddings: false"
            )
    return {name: each for name, each in tensors.items() if tied.get(name) not in tensors}
