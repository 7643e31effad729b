"""Adapted modules that no gradient of the loss reaches, such as the indexers of DeepSeek-V3.2: nothing would be trained
there, so they are named, or left out of all-linear."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$")
"""Matches the numbers of layers and experts in a path."""


def modules_with(model: Any, parameters: "Iterable[torch.Tensor]") -> tuple[list[str], list[str]]:
    """Return the paths of peft's adapted modules of which a trained parameter is among `parameters`, and of all."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    wanted, base = {id(each) for each in parameters}, model.get_base_model()
    adapted = {}
    for path, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            factors = base.get_submodule(path).named_parameters()
            adapted[path] = {id(each) for name, each in factors if ".base_layer." not in f".{name}"}
    return [path for path, own in adapted.items() if not wanted.isdisjoint(own)], list(adapted)


def expressions(paths: Sequence[str], every: Iterable[str]) -> list[str]:
    """Return regular expressions that match `paths` and no other path of `every`: one for all layers where all have the
    module, otherwise one a path."""
    mixed = {NUMBER.sub("{}", path) for path in set(every) - set(paths)}
    forms = ((path, NUMBER.sub("{}", path)) for path in paths)
    return list(
        dict.fromkeys(
            re.escape(path) if form in mixed else re.escape(form).replace(r"\{\}", r"\d+") for path, form in forms
        )
    )


def of_any_expert(name: str) -> str:
    """Return a parameter's name with {} for each number but that of its layer: of the modules of a layer that differ in
    these alone, as experts do, a token may reach some."""
    layer = NUMBER.search(name)
    return name if layer is None else name[: layer.end()] + NUMBER.sub("{}", name[layer.end() :])


def leave_out(model: Any, expressions: Sequence[str]) -> None:
    """Take the adapters of the modules whose path matches an expression away from peft's model and out of its config;
    of a model of which all weights are trained, freeze those whose name does."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not expressions:
        return
    pattern = "|".join(expressions)
    if not hasattr(model, "peft_config"):
        for name, parameter in model.named_parameters():
            if re.fullmatch(pattern, name):
                parameter.requires_grad_(False)
        return
    base = model.get_base_model()
    for path, module in list(base.named_modules()):
        if isinstance(module, BaseTunerLayer) and re.fullmatch(pattern, path):
            parent, _, name = path.rpartition(".")
            setattr(base.get_submodule(parent), name, module.get_base_layer())
    config = model.peft_config["default"]
    config.exclude_modules = "|".join(filter(None, (config.exclude_modules, pattern)))
