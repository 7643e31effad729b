"""What peft's LoRA adapts in a mixture of experts: parameters of experts and routers, which are no linear modules.

transformers 5 keeps the experts of a layer in two three-dimensional parameters and gives routers a class of their own.
In the families below peft reads targets as the names of transformers 4, where both were linear modules, and adapts the
parameters in their place; in other families it adapts neither. It does so whatever stands before the name: there
shared_experts.up_proj means the routed experts too. So a linear module that is named by more than its last word is
adapted as a parameter, its weight, which peft's own readers of the adapter understand as well.
Sources: peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe; peft/tuners/lora/layer.py,
ParamWrapper; transformers/conversion_mapping.py, _MODEL_TO_CONVERSION_PATTERN.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerolora.errors import UserError, shown

if TYPE_CHECKING:
    from zerolora.model.spec import ModelSpec, Module

ROUTER = "gate.weight"
MIXTRAL = {"gate": ROUTER, "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
QWEN = {"gate": ROUTER, "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
FUSED = {"gate_up_proj": 2}
"""How many former modules a parameter holds; its adapter has as many times the rank."""
FAMILIES = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), MIXTRAL),
    **dict.fromkeys(
        (
            *("afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
            *("flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash"),
            *("mellum", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text"),
            *("qwen3_omni_moe_thinker", "solar_open", "cohere2_moe", "beam"),
        ),
        QWEN,
    ),
}
"""Former names of modules and their parameters of today, by model_type."""


@dataclass(frozen=True)
class AdaptedParameter:
    """A parameter that gets two factors for each expert."""

    module: "Module"
    name: str
    experts: int
    """1 for a router."""
    inputs: int
    outputs: int

    @property
    def path(self) -> str:
        """Of the parameter, with {} for the layer's number."""
        return f"{self.module.path}.{self.name}"

    def tensors(self, r: int) -> list[int]:
        """Return the elements of both factors, which peft keeps for all experts in two tensors."""
        return [self.inputs * r * self.experts, r * self.experts * self.outputs]

    def factored(self, r: int) -> int:
        """Return the rows and columns of both factors."""
        return sum(self.experts * r + size // (self.experts * r) for size in self.tensors(r))


def split_targets(model: "ModelSpec", names: tuple[str, ...]) -> tuple[tuple[str, ...], list[AdaptedParameter]]:
    """Return those of `names` that are modules, and the parameters that the others stand for: by the former name of a
    module, or by their own, as in experts.gate_up_proj.

    Raises UserError if only a part of what a parameter holds is named.
    """
    table = FAMILIES.get(model.family, {})
    weights = [
        AdaptedParameter(module, "weight", 1, module.inputs, module.outputs)
        for module in model.linears
        if any(paths_named(model.family, names, [module.path.format(number)]) for number in module.numbers)
    ]
    by_path = paths_named(
        model.family, names, [module.path.format(number) for module in model.linears for number in module.numbers]
    )
    names = tuple(name for name in names if name not in by_path)
    former = {name: old for name in names for old in table if name == old or name.endswith(f".{old}")}
    for parameter in FUSED:
        held = {old for old, new in table.items() if new == parameter}
        if held & set(former.values()) and held - set(former.values()):
            raise UserError(
                f"train.lora.targets: a {model.family} keeps {' and '.join(sorted(held))} in one parameter; "
                "write both or neither"
            )
    own = {name for name in names if name not in former and _parameters(model, {name})}
    found = _parameters(model, {table[old] for old in former.values()}) + _parameters(model, own) + weights
    return tuple(name for name in names if name not in {*former, *own}), found


def paths_named(family: str, names: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Return those of `names` that end the path of a linear module, by more than a last word that has a former meaning
    in the family. Their weights are adapted as parameters."""
    table, ends = FAMILIES.get(family, {}), [f".{path}" for path in paths]
    named = (name for name in names if "." in name and name.rpartition(".")[2] in table)
    return [name for name in named if any(end.endswith(f".{name}") for end in ends)]


def check_expression(family: str, targets: str | tuple[str, ...] | list[str]) -> None:
    """Raise UserError if targets are a regular expression in a family in the table: peft then takes the names that it
    matches, in every layer (transformers_weight_conversion.py, _resolve_string_target_modules)."""
    if isinstance(targets, str) and targets != "all-linear" and family in FAMILIES:
        raise UserError(
            f"train.lora.targets: {shown(targets)} is a regular expression, which cannot select layers of a {family}; "
            "write all-linear, or a list of names"
        )


def all_linear(model: "ModelSpec") -> tuple[list["Module"], list[AdaptedParameter]]:
    """Return what all-linear adapts: modules, and parameters in place of those with a former name, but no router, which
    peft's all-linear adapts too."""
    table = FAMILIES.get(model.family, {})
    modules = [module for module in model.linears if module.name not in table]
    return modules, _parameters(model, set(table.values()) - {ROUTER})


def _parameters(model: "ModelSpec", names: set[str]) -> list[AdaptedParameter]:
    found = []
    for module in model.modules if names else ():
        for name, shape in module.weights:
            if any(f"{module.path}.{name}".endswith(f".{each}") for each in names):
                *experts, outputs, inputs = shape
                found.append(AdaptedParameter(module, name, experts[0] if experts else 1, inputs, outputs))
    return found
