"""LoRA targets in a mixture of experts: parameters of experts and routers, which are not linear modules.

transformers 5 stores a layer's experts in two three-dimensional parameters, and routers have a class of their own. In
the families below peft reads targets as transformers 4's names of linear modules, and adapts the parameters instead; in
other families it adapts neither. It ignores the path before the name, so shared_experts.up_proj means the routed
experts too. A linear module with a longer path is therefore adapted as a parameter, its weight, which peft's readers of
the adapter support.
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
"""Number of former modules in a parameter, and factor of its adapter's rank."""
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
"""Former names of modules and their present parameters, by model_type."""


@dataclass(frozen=True)
class AdaptedParameter:
    """A parameter with two factors for each expert."""

    module: "Module"
    name: str
    experts: int
    """1 for a router."""
    inputs: int
    outputs: int

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


def split_targets(model: "ModelSpec", names: tuple[str, ...]) -> tuple[tuple[str, ...], list[AdaptedParameter]]:
    """Return the names that are modules, and the parameters of the others: former names of modules, or parameters' own
    names, as in experts.gate_up_proj.

    Raises UserError if only some of a parameter's former modules are named.
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
                "name both or neither"
            )
    own = {name for name in names if name not in former and _parameters(model, {name})}
    result = _parameters(model, {table[old] for old in former.values()}) + _parameters(model, own) + weights
    return tuple(name for name in names if name not in {*former, *own}), result


def paths_named(family: str, names: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Return the names of several words that end the path of a linear module, and whose last word is a former name in
    the family. Their weights are adapted as parameters."""
    table, ends = FAMILIES.get(family, {}), [f".{path}" for path in paths]
    named = (name for name in names if "." in name and name.rpartition(".")[2] in table)
    return [name for name in named if any(end.endswith(f".{name}") for end in ends)]


def check_expression(family: str, targets: str | tuple[str, ...] | list[str]) -> None:
    """Raise UserError if targets are a regular expression in a family of the table: peft adapts the names that it
    matches in every layer (transformers_weight_conversion.py, _resolve_string_target_modules)."""
    if isinstance(targets, str) and targets != "all-linear" and family in FAMILIES:
        raise UserError(
            f"train.lora.targets: {shown(targets)} is a regular expression, which cannot select layers of a {family}; "
            "use all-linear, or a list of names"
        )


def all_linear(model: "ModelSpec") -> tuple[list["Module"], list[AdaptedParameter]]:
    """Return the modules and parameters that all-linear adapts, without routers, unlike peft's all-linear."""
    table = FAMILIES.get(model.family, {})
    modules = [module for module in model.linears if module.name not in table]
    return modules, _parameters(model, set(table.values()) - {ROUTER})


def _parameters(model: "ModelSpec", names: set[str]) -> list[AdaptedParameter]:
    result = []
    for module in model.modules if names else ():
        for name, shape in module.weights:
            if any(f"{module.path}.{name}".endswith(f".{each}") for each in names):
                *experts, outputs, inputs = shape
                result.append(AdaptedParameter(module, name, experts[0] if experts else 1, inputs, outputs))
    return result
