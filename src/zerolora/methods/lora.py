"""LoRA (arXiv 2106.09685): two factors of rank r beside a frozen linear module. Trained, estimated and merged.

Sources: section 4.1 of the paper; which modules a name means and what of them is trained: peft/tuners/lora/model.py and
layer.py.
"""

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zerolora.errors import UserError
from zerolora.methods.base import (
    ADAPTABLE,
    Method,
    TrainableMethod,
    TrainedParameters,
    Update,
    named_modules,
    saved_tensors,
)

if TYPE_CHECKING:
    import torch

    from zerolora.config.schema import Lora as LoraSettings
    from zerolora.memory.model_spec import ModelSpec, Module
    from zerolora.memory.projections import Projections
    from zerolora.memory.tracer import Value

PREFIX = "base_model.model."  # peft's, of every tensor's name


@dataclass(frozen=True)
class LowRank(Method):
    """What LoRA, DoRA and QLoRA share: two factors of rank r for each adapted module."""

    r: int = 8
    """Rank of the two factors."""
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear, or names or ends of paths of modules."""
    dropout: float = 0.0
    """Dropout before the first factor."""
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """Other ranks for modules by name, path or regular expression, as in peft's rank_pattern."""
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a whole copy is trained and saved."""

    @property
    def drops(self) -> bool:
        """Whether dropout is applied to the adapter's input."""
        return self.dropout > 0

    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return the factors as trained, the base model as frozen."""
        tensors: list[int] = []
        ranks: dict[str, int] = {}
        for module in self._targets(model):
            for layer in range(module.count):
                r = self._rank(module.path.format(layer))
                ranks.setdefault(module.path, r)
                tensors += self.tensors(module, r)
        if self.targets == "all-linear" and (experts := _expert_parameters(model, self.r)):
            tensors.append(experts)
        tensors += saved_tensors(model, self.modules_to_save)
        return TrainedParameters(
            model.parameters, sum(tensors), self.frozen_bytes(model, width), tuple(ranks.items()), max(tensors)
        )

    def tensors(self, module: "Module", r: int) -> list[int]:
        """Return the elements of each tensor added to one copy of a module."""
        inputs, outputs = (module.inputs, module.outputs) if module.inputs else module.weights[0][1]
        return [inputs * r, outputs * r]

    def frozen_bytes(self, model: "ModelSpec", width: int) -> float:
        """Return the bytes of the base model; `width` is the bytes of a weight."""
        return float(model.parameters * width)

    def _targets(self, model: "ModelSpec") -> "list[Module]":
        if self.targets == "all-linear":
            return list(model.linears)
        names = (self.targets,) if isinstance(self.targets, str) else self.targets
        adaptable = [module for module in model.modules if module.kind in ADAPTABLE]
        return named_modules(model, names, "train.lora.targets", adaptable)

    def _rank(self, path: str) -> int:
        """Return r of a module (peft/utils/other.py, get_pattern_key)."""
        for key, r in self.rank_pattern:
            if re.fullmatch(rf"(.*\.)?({key})", path):
                return r
        return self.r

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace result + B(A(x))·scale (peft/tuners/lora/layer.py, Linear.forward)."""
        result = layer.frozen(value, module)
        r = layer.ranks.get(module.path, 0)
        if not r:
            return result
        before = result.width
        value = self.dropped_input(layer, value)
        update = layer.unary(factors(layer, value, module, r))
        return layer.cast(layer.add(result, update), before)

    def dropped_input(self, layer: "Projections", value: "Value") -> "Value":
        """Trace the adapter's input, cast to the adapter's width."""
        value = layer.cast(value, layer.trained.width)
        return layer.dropped(value) if self.drops else value


@dataclass(frozen=True)
class LoraMethod(LowRank, TrainableMethod):
    """LoRA."""

    name: ClassVar[str] = "lora"

    @staticmethod
    def build(model: Any, settings: "LoraSettings") -> Any:
        """Return peft's model around a transformers model, with a fresh adapter in the model's own type.

        Raises UserError if a target is not in the model.
        """
        import torch
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.r,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            lora_dropout=settings.dropout,
            use_rslora=settings.rank_stabilized,
            target_modules=settings.targets,
            bias="none",
        )
        # peft warns of a missing cast on the meta device, where there is nothing to cast.
        logging.getLogger("peft").setLevel(logging.ERROR)
        try:
            # In the base's type: stage 3 leaves it as it is, and has a loss scale only if it is fp16; stages 0 to 2
            # would cast it; DDP and FSDP hold it in fp32, and cast it themselves.
            return get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise UserError(
                f"train.lora.targets {settings.targets!r} does not fit the model ({str(error).splitlines()[0]:.120}); "
                f"write all-linear or some of {', '.join(names)}"
            ) from None

    @staticmethod
    def updates(weights: Path, config: dict[str, Any]) -> dict[str, Update]:
        """Return what an adapter adds to each base weight, by the weight's name.

        Raises UserError if a tensor is no LoRA factor.
        """
        from safetensors.torch import load_file

        # rsLoRA scales by alpha / sqrt(r) (arXiv 2312.03732), LoRA by alpha / r.
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        # GPT-2's Conv1D keeps its weight as [inputs, outputs].
        transposed = bool(config.get("fan_in_fan_out"))
        products: dict[str, Product] = {}
        for name, tensor in load_file(weights).items():
            module, _, rest = name.removeprefix(PREFIX).partition(".lora_")
            factor = rest.split(".")[0]
            if factor not in ("A", "B"):
                raise UserError(f"{weights}: {name} is no LoRA factor; merge it with peft's merge_and_unload")
            weight = f"{module}.weight"
            products.setdefault(weight, Product(weight, {}, scale, transposed)).factors[factor] = tensor
        return dict(products)


@dataclass(frozen=True)
class Product(Update):
    """B·A·scale, multiplied out when it is asked for."""

    weight: str
    """Name of the base weight."""
    factors: "dict[str, torch.Tensor]"
    """A: [r, inputs], B: [outputs, r]."""
    scale: float
    transposed: bool
    """The weight is [inputs, outputs]."""

    def tensor(self) -> "torch.Tensor":
        """Return it in fp32, in the shape of the weight. Raises UserError if a factor is missing."""
        for factor in ("A", "B"):
            if factor not in self.factors:
                raise UserError(f"the adapter has no lora_{factor} for {self.weight}; train it again")
        product = self.factors["B"].float() @ self.factors["A"].float() * self.scale
        return product.T if self.transposed else product


def factors(layer: "Projections", value: "Value", module: "Module", r: int) -> "Value":
    """Trace B(A(x))."""
    first = layer.adapter_weight(module.inputs * r)
    second = layer.adapter_weight(module.outputs * r)
    return layer.linear(layer.linear(value, module.inputs, r, first), r, module.outputs, second)


def _expert_parameters(model: "ModelSpec", r: int) -> int:
    """Return what peft's all-linear adds to a Mixtral beside its linears: adapters on the router and on each expert.

    In transformers 5 they are no nn.Linear, but peft adapts them as in version 4: gate and up, which are one parameter,
    with twice the rank (peft/utils/transformers_weight_conversion.py, _convert_peft_config_moe).
    """
    if model.family != "mixtral":
        return 0
    total = 0
    for module in model.modules:
        if module.kind in ("router", "experts"):
            for name, (*experts, outputs, inputs) in module.weights:
                rank = 2 * r if name == "gate_up_proj" else r
                total += rank * math.prod(experts) * (inputs + outputs) * module.count
    return total
