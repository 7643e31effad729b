"""Which weights of a model are one and the same: embedding and head, in most small models."""

from typing import Any

from zerolora.memory.model_spec import ModelSpec


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
