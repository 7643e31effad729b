"""LoRA (arXiv 2106.09685): two factors of rank r beside a frozen linear module.

Sources: section 4.1 of the paper; peft/tuners/lora/model.py and layer.py for targets and trained tensors.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from zerolora.bounded import bounded_matching
from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.errors import UserError, shown
from zerolora.methods.adapter_check import MAGNITUDE, ImpliedShapes, check_adapter
from zerolora.methods.adapter_config import is_saved, rank_and_alpha
from zerolora.methods.experts import FAMILIES, FUSED, AdaptedParameter, all_linear, check_expression, split_targets
from zerolora.methods.lora_init import doubled, is_start
from zerolora.methods.method import (
    ADAPTABLE,
    SHARED,
    Method,
    TrainableMethod,
    TrainedParameters,
    Update,
    check_shape,
    check_untied,
    is_named,
    saved_factors,
    saved_tensors,
    tied_weights,
)
from zerolora.methods.peft_format import (
    ADAPTER,
    PREFIX,
    adapted_paths,
    check_names,
    check_pattern,
    conv1d_paths,
    outside,
    peft_model,
    peft_state,
    peft_targets,
    read_adapter,
    saved_name,
)
from zerolora.methods.token_rows import SUFFIX, check_targets, row_options, row_tensors, row_update
from zerolora.tensor_file import StoredTensor, rows_of, whole

if TYPE_CHECKING:
    import torch

    from zerolora.config.method_sections import MethodSections
    from zerolora.model.projections import Projections
    from zerolora.model.spec import ModelSpec, Module
    from zerolora.model.tracer import Value
    from zerolora.tensor_file import Factor

KEPT = 32
"""Factors in memory from one block of rows to the next: more than threads use."""
SMALL = 2**23
"""Maximum bytes of a factor that is read whole, although a block needs only some of its rows."""
PARTS = ("A", "B", "embedding_A", "embedding_B", "magnitude_vector")


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
        modules, parameters = self._targets(model)
        for module in modules:
            for path, copies in self._copies(module, module.path):
                if not self._is_target(path):  # a layer that is no target
                    continue
                r = self._rank(path, self.r)
                self._check_init(module, path, r)
                ranks.setdefault(module.path, r)
                tensors += self.tensors(module, r) * copies
                factored += self.factored(module, r) * copies
        for each in parameters:
            for path, copies in self._copies(each.module, each.path):
                if each.module.kind == "linear" and not self._is_target(path.removesuffix(".weight")):
                    continue
                r = self._rank(path, self._parameter_rank(each))
                ranks.setdefault(each.path, r)
                tensors += self.parameter_tensors(each, r) * copies
                factored += each.factored(r) * copies
        rows = row_tensors(model, self.added_tokens, modules, self.modules_to_save)
        factored += sum(self.added_tokens + size // self.added_tokens for size in rows)
        return tensors + saved_tensors(model, self.modules_to_save) + rows, factored, ranks

    def _copies(self, module: "Module", path: str) -> Iterator[tuple[str, int]]:
        """Yield (path, 1) for each copy of a module, or of its parameter; (path, copies) if all copies are equal."""
        if not self.rank_pattern and self.targets == "all-linear":
            yield path, module.count
            return
        yield from ((each, 1) for each in _paths(module, path))

    def _check_init(self, module: "Module", path: str, r: int) -> None:
        """Raise UserError if a module's factors cannot be initialized from its weight."""
        smaller = min(module.inputs, module.outputs)
        if self.init == DEFAULT_INIT or r <= smaller:
            return
        problem = f"has {smaller} singular values, fewer than r {r}"
        remedy = f"write an r of at most {smaller}"
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
                f"start in peft; write init: {DEFAULT_INIT}, or targets without the experts and their router, as in "
                "q_proj"
            )
        if self.drops:
            raise UserError(
                f"train.lora.dropout is {self.dropout:g}, and {parameter.path} is a parameter, which peft adapts "
                "without dropout only; write 0, or targets without the experts and their router, as in q_proj"
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

    def _targets(self, model: "ModelSpec") -> "tuple[list[Module], list[AdaptedParameter]]":
        """Return the adapted modules and parameters. Raises UserError if a name or a pattern matches none."""
        if self.targets == "all-linear":
            modules, parameters = all_linear(model)
            if not (modules or parameters):
                raise UserError(
                    f"train.lora.targets is all-linear, and a {model.family} has no linear module that can be adapted; "
                    "write names of other modules, as of an embedding, or method: full"
                )
        else:
            check_expression(model.family, self.targets)
            adaptable = [module for module in model.modules if module.kind in ADAPTABLE]
            paths = {module: _paths(module, module.path) for module in adaptable}
            if isinstance(self.targets, str):
                modules = [each for each in adaptable if any(map(self._is_target, paths[each]))]
                parameters = []
                unfit = [] if modules else [self.targets]
            else:
                names, parameters = split_targets(model, self.targets)
                modules = [each for each in adaptable if any(is_named(path, names) for path in paths[each])]
                every = [path for module in adaptable for path in paths[module]]
                unfit = [name for name in names if not any(is_named(path, (name,)) for path in every)]
            if unfit:
                known = ", ".join(sorted({module.name for module in model.linears}))
                raise UserError(
                    f"train.lora.targets: {shown(unfit[0])} is not in the model; write all-linear, some of {known}, or "
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

    def _parameter_rank(self, parameter: AdaptedParameter) -> int:
        """Return r of a parameter of experts: multiplied by the number of former modules if named by those."""
        named = not isinstance(self.targets, str) and is_named(parameter.path, self.targets)
        return self.r if named else self.r * FUSED.get(parameter.name, 1)

    def _rank(self, path: str, default: int) -> int:
        """Return r of a module (peft/utils/other.py, get_pattern_key)."""
        for key, r in self.rank_pattern:
            if re.fullmatch(rf"(.*\.)?({key})", path):
                return r
        return default

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace result + B(A(x))·scale (peft/tuners/lora/layer.py, Linear.forward)."""
        if r := layer.ranks.get(f"{module.path}.weight", 0):
            return adapted_weight(layer, module, value, r)
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


def _shapes(
    config: Mapping[str, Any], model: "ModelSpec", module: "Module", path: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the tensors of a module."""
    r, _ = rank_and_alpha(config, path)
    if module.kind == "embedding":
        rows, outputs = dict(module.weights)["weight"]
        yield "lora_embedding_A", (r, rows)
        yield "lora_embedding_B", (outputs, r)
    else:
        outputs = module.outputs
        yield "lora_A.weight", (r, module.inputs)
        yield "lora_B.weight", (outputs, r)
    if config.get("use_dora"):
        yield MAGNITUDE.removeprefix("."), (outputs,)


@dataclass(frozen=True)
class TrainedLowRank(LowRank, PeftMethod):
    """LoRA, DoRA and QLoRA: built by peft, and merged."""

    sections: ClassVar[tuple[str, ...]] = ("lora",)
    peft_type: ClassVar[str | None] = "LORA"
    shapes: ClassVar[ImpliedShapes] = ImpliedShapes(_shapes)
    meaning: ClassVar[Mapping[str, str]] = {
        "r": "lora.r",
        "lora_alpha": "lora.alpha",
        "use_rslora": "lora.rank_stabilized",
        "rank_pattern": "lora.rank_pattern",
        "alpha_pattern": "lora.alpha_pattern",
    }

    @classmethod
    def of(cls, settings: "MethodSections") -> Self:
        lora = settings.lora
        return cls(
            r=lora.r,
            targets=lora.targets if isinstance(lora.targets, str) else tuple(lora.targets),
            dropout=lora.dropout,
            rank_pattern=tuple(lora.rank_pattern.items()),
            alpha_pattern=tuple(lora.alpha_pattern),
            modules_to_save=tuple(lora.modules_to_save),
            init=lora.init,
        )

    @classmethod
    def identity(cls, settings: "MethodSections", published: bool = False) -> dict[str, Any]:
        """Return r, alpha and their patterns; a published adapter with another init has twice the rank."""
        result = super().identity(settings, published)
        return doubled(result) if published and settings.lora.init != DEFAULT_INIT else result

    @classmethod
    def build(cls, model: Any, settings: "MethodSections", rows: Sequence[int] = ()) -> Any:
        from peft import LoraConfig

        lora = settings.lora
        targets, parameters = peft_targets(model, lora.targets)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated as int, used as a factor
            lora_dropout=lora.dropout,
            use_rslora=lora.rank_stabilized,
            target_modules=targets,
            target_parameters=parameters or None,
            exclude_modules=outside(model),
            rank_pattern=dict(lora.rank_pattern),
            alpha_pattern=dict(lora.alpha_pattern),
            modules_to_save=list(lora.modules_to_save) or None,
            bias="none",
            **row_options(model, rows, lora.modules_to_save),
            **cls.options,
        )
        check_targets(model, config)
        wrapped = peft_model(model, config, "train.lora", lora.targets)
        former = FAMILIES.get(model.config.get_text_config().model_type, {})
        named = [name for name in targets if name.rpartition(".")[2] not in former]
        check_names(wrapped, "train.lora", named if isinstance(lora.targets, list) else "", lora.modules_to_save)
        adapted = adapted_paths(wrapped)
        for key, pattern in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
            check_pattern(adapted, f"train.lora.{key}", pattern)
        return wrapped

    @classmethod
    def fits_listed(cls, settings: "MethodSections", model: "ModelSpec") -> bool:
        """Return whether all targets are linear modules that the spec lists: peft adapts those, and the files contain
        their weights. A regular expression may match modules that it does not list."""
        method = cls.of(settings)
        if method.init != DEFAULT_INIT or method.modules_to_save:
            return False
        if isinstance(method.targets, str) and method.targets != "all-linear":
            return False
        method.parameters(model, 2)
        modules, parameters = method._targets(model)
        return not parameters and all(module.kind == "linear" for module in modules)

    @staticmethod
    def is_untrained(name: str, tensor: "torch.Tensor") -> bool:
        return "lora_B" in name and (not bool(tensor.any()) or is_start(tensor))

    @staticmethod
    def updates_of(tensors: "Mapping[str, Factor]", config: dict[str, Any], model: Any) -> dict[str, Update]:
        """Return the update of each weight of an adapter in peft's format: LoRA, rsLoRA, DoRA.

        `model` is the base on the meta device, or its spec. Raises UserError if a tensor is none of theirs, or has no
        weight of the base that it could be added to.
        """
        result: dict[str, Update] = {}
        modules: dict[str, dict[str, Factor]] = {}
        copies: dict[str, Factor] = {}
        for name, tensor in tensors.items():
            module, _, rest = name.removeprefix(PREFIX).partition(".lora_")
            part = rest.removesuffix(".weight")
            if part in PARTS:
                modules.setdefault(module, {})[part] = tensor
            elif name.endswith(SUFFIX):
                result |= row_update(name, tensor, config, model, tensors)
            elif not rest and (saved_name(name) == name.removeprefix(PREFIX) and is_saved(config, saved_name(name))):
                result[saved_name(name)] = Replacement(saved_name(name), tensor)
            elif not rest:
                copies[saved_name(name)] = tensor
            elif rest == "B.bias":
                result[f"{module}.bias"] = Shift(f"{module}.bias", tensor, _scale(config, module))
            else:
                raise UserError(f"{ADAPTER}: {name} is not a LoRA factor; merge it with peft's merge_and_unload")
        experts = _expert_parameters_of(model, config) if config.get("target_parameters") else {}
        transposed_paths = conv1d_paths(model)
        for module, parts in modules.items():
            if module in experts:
                weight, shape, transposed, scale = experts[module]
                result[weight] = ExpertProducts(weight, parts["A"], parts["B"], scale, shape, transposed)
                continue
            update = Product(f"{module}.weight", parts, _scale(config, module), module in transposed_paths)
            result[update.weight] = update
        return _upon_copies(result, copies, tied_weights(model))


@dataclass(frozen=True)
class LoraMethod(TrainedLowRank):
    """LoRA."""

    name: ClassVar[str] = "lora"


def _scale(config: dict[str, Any], module: str) -> float:
    """Return the factor of a module's product."""
    r, alpha = rank_and_alpha(config, module)
    # rsLoRA scales by alpha / sqrt(r) (arXiv 2312.03732), LoRA by alpha / r.
    return alpha / (r**0.5 if config.get("use_rslora") else r)


def _upon_copies(
    updates: dict[str, Update], copies: "Mapping[str, Factor]", tied: Mapping[str, str]
) -> dict[str, Update]:
    """Return updates that start from `copies` of the base's weights in the adapter's file.

    peft loads such a copy into the base; the copy of a shared weight into both modules.
    """
    result, starts = dict(updates), dict(copies)
    for copy, name in tied.items():
        shared = starts.get(copy, starts.get(name))  # peft loads the head last
        if shared is not None:
            starts |= {copy: shared, name: shared}
    for weight, tensor in starts.items():
        update = result.get(weight)
        # An otherwise unchanged shared weight is a second name of the first, which few checkpoints have.
        start = Replacement(weight, tensor, optional=weight in tied and not {weight, tied[weight]} & updates.keys())
        if update is None:
            result[weight] = start
        elif not isinstance(update, Replacement):
            result[weight] = Then((start, update))
    return result


def _expert_parameters_of(model: Any, config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bool, float]]:
    """Return (parameter, its shape, whether an expert's weight is [inputs, outputs], scale) by the path of the adapter,
    from peft, which nests the wrappers of a module's parameters."""
    import copy

    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper

    known = {key: value for key, value in config.items() if key in LoraConfig.__dataclass_fields__}
    wrapped = peft_model(copy.deepcopy(model), LoraConfig(**known), "the adapter", config["target_parameters"])
    return {
        path: (
            f"{path.replace('.base_layer', '')}.{module.parameter_name}",
            tuple(module.get_param().shape),  # type: ignore[no-untyped-call]  # peft's
            not module._did_swap_in_out_features and module.num_experts > 1,  # of one, A is [r, inputs] either way
            module.scaling["default"],
        )
        for path, module in wrapped.get_base_model().named_modules()
        if isinstance(module, ParamWrapper)
    }


@dataclass(frozen=True)
class ExpertProducts(Update):
    """Adds B·A·scale of each expert to its part of the parameter of all experts."""

    weight: str
    first: "Factor"
    """[experts x r, inputs]"""
    second: "Factor"
    """[outputs, r x experts]"""
    scale: float
    shape: tuple[int, ...]
    transposed: bool
    """An expert's weight is [inputs, outputs]."""

    @property
    def by_rows(self) -> bool:
        """Whether a row is an expert."""
        return len(self.shape) == 3

    def check(self, shape: tuple[int, ...]) -> None:
        check_shape(self.weight, shape, self.shape)

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        """Add the products (peft/tuners/lora/layer.py, ParamWrapper.get_delta_weight)."""
        experts = self.shape[0] if self.by_rows else 1
        count, r = len(rows) if self.by_rows else 1, self.first.shape[0] // experts
        left = rows_of(self.first, first * r, (first + count) * r).float().reshape(count, r, -1)
        right = _in_fp32(self.second).reshape(self.second.shape[0], r, experts)
        for expert in range(count):
            product = right[:, :, first + expert] @ left[expert] * self.scale
            part = rows[expert] if self.by_rows else rows
            part.add_(product.T if self.transposed else product)


@dataclass(frozen=True)
class Product(Update):
    """Adds B·A·scale to a weight; with DoRA the rows of the sum are then scaled to trained norms."""

    weight: str
    """Name of the base weight."""
    parts: "dict[str, Factor]"
    """A: [r, inputs], B: [outputs, r], magnitude_vector: [outputs]; of an embedding [r, rows] and [width, r]."""
    scale: float
    transposed: bool
    """The weight is [inputs, outputs]."""

    @property
    def factors(self) -> "tuple[Factor, Factor]":
        """A and B. Raises UserError if one is missing."""
        names = ("embedding_A", "embedding_B") if "embedding_A" in self.parts else ("A", "B")
        for factor in names:
            if factor not in self.parts:
                raise UserError(f"the adapter has no lora_{factor} for {self.weight}; train it again")
        return self.parts[names[0]], self.parts[names[1]]

    @property
    def turned(self) -> bool:
        """Whether the weight is the transpose of B·A."""
        return self.transposed or "embedding_A" in self.parts

    @property
    def by_rows(self) -> bool:
        """Whether no norm is taken across rows."""
        return "magnitude_vector" not in self.parts or not self.turned

    def check(self, shape: tuple[int, ...]) -> None:
        first, second = self.factors
        product = (second.shape[0], first.shape[1])
        check_shape(self.weight, shape, product[::-1] if self.turned else product)

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        """Add B·A·scale, and scale to the trained norms."""
        import torch

        left, right = self.factors
        last = first + len(rows)
        if self.turned:
            one, other = _in_fp32(right), _in_fp32(left)[:, first:last]
        else:
            one, other = _rows_in_fp32(right, first, last), _in_fp32(left)
        product = torch.mm(one, other).mul_(self.scale)
        rows.add_(product.T if self.turned else product)
        magnitude = self.parts.get("magnitude_vector")
        if magnitude is None:
            return
        # arXiv 2402.09353, section 4.1; peft/tuners/lora/variants.py: a norm for each output.
        along = 0 if self.turned else 1
        norms = whole(magnitude) if self.turned else rows_of(magnitude, first, last)
        scaled: torch.Tensor = norms.float() / torch.linalg.vector_norm(rows, dim=along)
        rows.mul_(scaled.unsqueeze(along))


@dataclass(frozen=True)
class Shift(Update):
    """Adds the factors' trained bias, times their scale, to the module's bias (peft's lora_bias)."""

    name: str
    trained: "Factor"
    scale: float

    def check(self, shape: tuple[int, ...]) -> None:
        check_shape(self.name, shape, tuple(self.trained.shape))

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        rows.add_(rows_of(self.trained, first, first + len(rows)).float(), alpha=self.scale)


@dataclass(frozen=True)
class Then(Update):
    """Several updates of one weight, in order."""

    updates: tuple[Update, ...]

    @property
    def by_rows(self) -> bool:
        return all(update.by_rows for update in self.updates)

    def check(self, shape: tuple[int, ...]) -> None:
        for update in self.updates:
            update.check(shape)

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        for update in self.updates:
            update.apply(rows, first)


@dataclass(frozen=True)
class Replacement(Update):
    """Replaces a weight by a trained one."""

    weight: str
    trained: "Factor"
    optional: bool = False
    """A second name of a shared weight, which few checkpoints have."""

    def check(self, shape: tuple[int, ...]) -> None:
        check_shape(self.weight, shape, tuple(self.trained.shape))

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        rows.copy_(rows_of(self.trained, first, first + len(rows)) if rows.ndim else whole(self.trained))


def _in_fp32(factor: "Factor") -> "torch.Tensor":
    """Return a whole factor, cached for many blocks of rows."""
    return _kept(factor) if isinstance(factor, StoredTensor) else factor.float()


def _rows_in_fp32(factor: "Factor", first: int, last: int) -> "torch.Tensor":
    if isinstance(factor, StoredTensor) and factor.nbytes <= SMALL:
        return _kept(factor)[first:last]
    return rows_of(factor, first, last).float()


@functools.lru_cache(maxsize=KEPT)
def _kept(factor: StoredTensor) -> "torch.Tensor":
    return factor.read().float()


def _paths(module: "Module", path: str) -> list[str]:
    """Return the path of each copy of a module, or of its parameter."""
    return [path.format(layer) for layer in module.numbers]


def adapted_weight(layer: "Projections", module: "Module", value: "Value", r: int) -> "Value":
    """Trace a linear module whose weight is adapted as a parameter: B·A, and its sum with the weight, which is saved
    for the backward pass (peft/tuners/lora/layer.py, ParamWrapper and _LoraParameterProxy)."""
    new, count, width = layer.tracer.new, value.count, value.width
    size = module.inputs * module.outputs
    pair = layer.cast(layer.of(layer.adapter_weight(r * (module.inputs + module.outputs))), width)
    small = pair.count
    product, total = new(size, width), new(size, width)
    total.source = layer.tracer.node([pair], [pair], lambda gradient: [new(small, width)])
    result = new(count / module.inputs * module.outputs, width)
    result.source = layer.tracer.node(
        [value, total], [value, total], lambda gradient: [new(count, width), new(size, width)]
    )
    del product
    return result


def factors(layer: "Projections", value: "Value", module: "Module", r: int) -> "Value":
    """Trace B(A(x))."""
    first = layer.adapter_weight(module.inputs * r)
    second = layer.adapter_weight(module.outputs * r)
    return layer.linear(layer.linear(value, module.inputs, r, first), r, module.outputs, second)
