"""The factors of LoRA, DoRA and QLoRA in a model's spec: which modules get some, their sizes, their forward pass."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerolora.bounded import bounded_matching
from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.errors import UserError, shown
from zerolora.methods.experts import AdaptedParameter, all_linear, named_parameters
from zerolora.methods.low_rank_trace import factors
from zerolora.methods.method import (
    ADAPTABLE,
    SHARED,
    Method,
    TrainedParameters,
    check_untied,
    is_named,
    saved_factors,
    saved_tensors,
)
from zerolora.methods.peft_format import check_pattern
from zerolora.methods.token_rows import row_tensors

if TYPE_CHECKING:
    from zerolora.model.projections import Projections
    from zerolora.model.spec import ModelSpec, Module
    from zerolora.model.tracer import Value


@dataclass(frozen=True)
class LowRank(Method):
    """The memory of LoRA, DoRA and QLoRA: two factors of rank r for each adapted module."""

    r: int = 8
    """Rank of the two factors."""
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear, a regular expression of whole paths, or names or ends of modules' paths."""
    dropout: float = 0.0
    """Dropout before the first factor."""
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """Ranks of modules by name, path or regular expression, as in peft's rank_pattern."""
    alpha_pattern: tuple[str, ...] = ()
    """Modules with another alpha, whose existence is checked."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained and saved in full."""
    init: str = DEFAULT_INIT
    """Initialization of the factors (lora_init.py)."""
    added_tokens: int = 0
    """Tokens whose rows of embedding and head are trained."""

    @property
    def drops(self) -> bool:
        """Whether dropout is applied to the adapter's input."""
        return self.dropout > 0

    @property
    def rows(self) -> int:
        """Trained rows of the embedding, and of an untied head: one for each added token."""
        return self.added_tokens

    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return the factors as trained, the base model as frozen."""
        tensors, factored, ranks = self.adapted(model)
        return TrainedParameters(
            model.parameters,
            sum(tensors),
            self.frozen_bytes(model, width),
            tuple(ranks.items()),
            max(tensors),
            factored,
            self.constants(model),
        )

    def adapted(self, model: "ModelSpec") -> tuple[list[int], int, dict[str, int]]:
        """Return the elements of each trained tensor, their rows and columns, and r by the path of each adapted module
        or parameter. Raises UserError if an expression takes too long to match their paths."""
        with bounded_matching("train.lora: targets, rank_pattern or alpha_pattern"):
            return self._adapted(model)

    def _adapted(self, model: "ModelSpec") -> tuple[list[int], int, dict[str, int]]:
        tensors: list[int] = []
        ranks: dict[str, int] = {}
        factored = saved_factors(model, self.modules_to_save)
        modules, parameters = self.targets_in(model)
        for module in modules:
            for number, copies in self._copies(module):
                path = module.path.format(number)
                if not self._is_target(path):  # a layer that is no target
                    continue
                r = self._rank(path, self.r)
                self._check_init(module, path, r)
                ranks.setdefault(module.path, r)
                tensors += self.tensors(module, r) * copies
                factored += self.factored(module, r) * copies
        for each in parameters:
            for number, copies in self._copies(each.module):
                if not any(self._is_target(name.format(number)) for name in each.names):
                    continue
                r = self._rank(each.path.format(number), self.r * each.joined)
                ranks.setdefault(each.path, r)
                tensors += self.parameter_tensors(each, r) * copies
                factored += each.factored(r) * copies
        rows = row_tensors(model, self.added_tokens, modules, self.modules_to_save)
        factored += sum(self.added_tokens + size // self.added_tokens for size in rows)
        return tensors + saved_tensors(model, self.modules_to_save) + rows, factored, ranks

    def _copies(self, module: "Module") -> Iterator[tuple[int, int]]:
        """Yield the number of each layer with a module, and 1; the first one's and all their number if all copies are
        adapted alike."""
        if not self.rank_pattern and self.targets == "all-linear":
            yield module.numbers[0], module.count
            return
        yield from ((number, 1) for number in module.numbers)

    def _check_init(self, module: "Module", path: str, r: int) -> None:
        """Raise UserError if a module's factors cannot be initialized from its weight."""
        smaller = min(module.inputs, module.outputs)
        if self.init == DEFAULT_INIT or r <= smaller:
            return
        problem = f"has {smaller} singular values, fewer than r {r}"
        remedy = f"use an r of at most {smaller}"
        if not smaller:
            problem = "is an embedding, whose factors have no other start"
            remedy = "leave it out of train.lora.targets"
        raise UserError(f"train.lora.init is {self.init}, and {path} {problem}; {remedy}, or init: {DEFAULT_INIT}")

    def tensors(self, module: "Module", r: int) -> list[int]:
        """Return the elements of each tensor added to one copy of a module."""
        inputs, outputs = (module.inputs, module.outputs) if module.inputs else module.weights[0][1]
        return [inputs * r, outputs * r]

    def factored(self, module: "Module", r: int) -> int:
        """Return the rows and columns of the matrices added to one copy of a module."""
        return sum(r + size // r for size in self.tensors(module, r))

    def parameter_tensors(self, parameter: AdaptedParameter, r: int) -> list[int]:
        """Return the elements of each tensor added to one copy of an expert's or a router's parameter.

        Raises UserError if peft cannot adapt it (peft/tuners/lora/layer.py, ParamWrapper).
        """
        if self.init != DEFAULT_INIT:
            raise UserError(
                f"train.lora.init is {self.init}, and {parameter.path} is a parameter, whose factors have no other "
                f"start in peft; set init: {DEFAULT_INIT}, or targets without the experts and their router, as in "
                "q_proj"
            )
        if self.drops:
            raise UserError(
                f"train.lora.dropout is {self.dropout:g}, and {parameter.path} is a parameter, which peft adapts "
                "without dropout only; use 0, or targets without the experts and their router, as in q_proj"
            )
        return parameter.tensors(r)

    def frozen_bytes(self, model: "ModelSpec", width: int) -> float:
        """Return the bytes of the base model; `width` is the bytes of a weight."""
        return float(model.parameters * width)

    def constants(self, model: "ModelSpec") -> float:
        """Return the bytes of quantization constants among them."""
        return 0.0

    def replaced(self, model: "ModelSpec") -> int:
        """Return the parameters of the modules from whose weights the initial factors are subtracted."""
        if self.init == DEFAULT_INIT:
            return 0
        adapted = self.adapted(model)[2]
        return sum(each.inputs * each.outputs * each.count for each in model.modules if each.path in adapted)

    def targets_in(self, model: "ModelSpec") -> "tuple[list[Module], list[AdaptedParameter]]":
        """Return the adapted modules and parameters. Raises UserError if a name or a pattern matches none."""
        if self.targets == "all-linear":
            modules, parameters = all_linear(model)
            if not (modules or parameters):
                raise UserError(
                    f"train.lora.targets is all-linear, and a {model.family} has no linear module that can be adapted; "
                    "give names of other modules, as of an embedding, or method: full"
                )
        else:
            adaptable = [module for module in model.modules if module.kind in ADAPTABLE]
            paths = {module: _paths(module, module.path) for module in adaptable}
            modules = [each for each in adaptable if any(map(self._is_target, paths[each]))]
            parameters = named_parameters(model, self._is_target)
            if isinstance(self.targets, str):
                unfit = [] if modules or parameters else [self.targets]
            else:
                every = [path for module in adaptable for path in paths[module]]
                every += [path for each in parameters for name in each.names for path in _paths(each.module, name)]
                unfit = [name for name in self.targets if not any(is_named(path, (name,)) for path in every)]
            if unfit:
                known = ", ".join(sorted({module.name for module in model.linears}))
                raise UserError(
                    f"train.lora.targets: {shown(unfit[0])} is not in the model; use all-linear, some of {known}, or "
                    "a regular expression of whole paths"
                )
        if self.rank_pattern or self.alpha_pattern:
            result = [path for module in modules for path in _paths(module, module.path)]
            result += [path for each in parameters for path in _paths(each.module, each.path)]
            check_pattern(result, "train.lora.rank_pattern", [key for key, _ in self.rank_pattern])
            check_pattern(result, "train.lora.alpha_pattern", self.alpha_pattern)
        check_untied(model.tied, "train.lora.targets", [module.path for module in modules if module.kind in SHARED])
        return modules, parameters

    def _is_target(self, path: str) -> bool:
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or re.fullmatch(self.targets, path) is not None
        return is_named(path, self.targets)

    def _rank(self, path: str, default: int) -> int:
        """Return r of a module (peft/utils/other.py, get_pattern_key)."""
        for key, r in self.rank_pattern:
            if re.fullmatch(rf"(.*\.)?({key})", path):
                return r
        return default

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace result + B(A(x))·scale (peft/tuners/lora/layer.py, Linear.forward)."""
        result = self.base(layer, module, value)
        r = layer.ranks.get(module.path, 0)
        if not r:
            return result
        before = result.width
        value = self.dropped_input(layer, value)
        update = layer.unary(factors(layer, value, module, r))
        return layer.cast(layer.add(result, update), before)

    def base(self, layer: "Projections", module: "Module", value: "Value") -> "Value":
        """Trace the frozen module."""
        return layer.frozen(value, module)

    def dropped_input(self, layer: "Projections", value: "Value") -> "Value":
        """Trace the adapter's input, cast to the adapter's width."""
        value = layer.cast(value, layer.trained.width)
        return layer.dropped(value) if self.drops else value


def _paths(module: "Module", path: str) -> list[str]:
    """Return the path of each copy of a module, or of its parameter."""
    return [path.format(layer) for layer in module.numbers]
