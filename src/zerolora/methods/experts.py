"""LoRA targets in a mixture of experts, alike in every family.

transformers 5 stores the weights of a layer's experts in three-dimensional parameters, and most routers have a class of
their own: neither are linear modules. all-linear adapts the parameters too, and no router. A name means all that has
it: linear modules, experts' parameters, and those that hold what the checkpoint's files call so (ModelSpec.former), as
gate_proj. Source for the ranks: peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerolora.errors import UserError

if TYPE_CHECKING:
    from zerolora.model.spec import ModelSpec, Module, ParameterShapes

ROUTED = "weight"
"""The parameter of a router."""
Former = tuple[tuple[str, str], ...]
"""The names of the files' modules, and of the parameter that holds their weights: ("gate_proj", "gate_up_proj")."""


@dataclass(frozen=True)
class AdaptedParameter:
    """A parameter with two factors for each expert."""

    module: "Module"
    name: str
    experts: int
    """1 for a router."""
    inputs: int
    outputs: int
    names: tuple[str, ...]
    """The paths by which targets name it, with {} for the layer's number."""
    joined: int = 1
    """Factor of its rank: the number of projections that it holds, unless it has been named itself."""

    @property
    def path(self) -> str:
        """Path of the parameter, with {} for the layer's number."""
        return f"{self.module.path}.{self.name}"

    def tensors(self, r: int) -> list[int]:
        """Return the elements of both factors, each one tensor for all experts."""
        return [self.inputs * r * self.experts, r * self.experts * self.outputs]

    def factored(self, r: int) -> int:
        """Return the rows and columns of both factors."""
        return sum(self.experts * r + size // (self.experts * r) for size in self.tensors(r))


def all_linear(model: "ModelSpec") -> "tuple[list[Module], list[AdaptedParameter]]":
    """Return the modules and parameters that all-linear adapts."""
    modules = [module for module in model.linears if not module.left_out]
    return modules, [
        _adapted(module, name, shape, model.former, own=False)
        for module in model.modules
        if module.kind == "experts"
        for name, shape in module.weights
        if len(shape) == 3
    ]


def named_parameters(model: "ModelSpec", matches: Callable[[str], bool]) -> list[AdaptedParameter]:
    """Return the parameters of experts and routers of which `matches` tells that a target names a path.

    Raises UserError if only some of the projections that a parameter holds are named.
    """
    result = []
    for module in model.modules:
        if module.kind not in ("experts", "router"):
            continue
        for name, shape in module.weights:
            paths = [module.path.format(number) for number in module.numbers]
            own = named(paths, name, module.kind, len(shape), model.former, matches)
            if own is not None:
                result.append(_adapted(module, name, shape, model.former, own=own))
    return result


def named(
    paths: Iterable[str], name: str, kind: str, dimensions: int, former: Former, matches: Callable[[str], bool]
) -> bool | None:
    """Return whether targets name a parameter of the modules at `paths` itself (True), or what it holds (False); None
    if they do neither. `kind` is that of the modules. Raises UserError as `named_parameters`."""
    if kind == "router":
        whole = name == ROUTED and dimensions == 2
        return True if whole and any(matches(path) or matches(f"{path}.{name}") for path in paths) else None
    if dimensions != 3:
        return None
    paths = list(paths)
    if any(matches(f"{path}.{name}") for path in paths):
        return True
    held = [old for old, new in former if new == name]
    some = [old for old in held if any(matches(f"{path}.{old}") for path in paths)]
    if some and len(some) < len(held):
        raise UserError(
            f"train.lora.targets: {' and '.join(held)} of {paths[0]} are one parameter, {name}; name both or neither"
        )
    return False if some else None


def projections(weights: "ParameterShapes | Mapping[str, tuple[int, ...]]", name: str) -> int:
    """Return the number of projections that a parameter of experts holds: 2 of gate and up, which have twice the
    elements of the other one."""
    sizes = {each: shape[1] * shape[2] for each, shape in dict(weights).items() if len(shape) == 3}
    return 2 if len(sizes) == 2 and sizes[name] == 2 * min(sizes.values()) else 1


def _adapted(module: "Module", name: str, shape: tuple[int, ...], former: Former, *, own: bool) -> AdaptedParameter:
    *experts, outputs, inputs = shape
    names = [f"{module.path}.{name}", *(f"{module.path}.{old}" for old, new in former if new == name)]
    if module.kind == "router":
        names.append(module.path)
    joined = 1 if own or len(shape) != 3 else projections(module.weights, name)
    return AdaptedParameter(module, name, experts[0] if experts else 1, inputs, outputs, tuple(names), joined)
