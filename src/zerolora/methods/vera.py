"""VeRA (arXiv 2310.11454): two random matrices that all modules share, and two trained vectors for each module.

An adapted module adds b ∘ (B(d ∘ (A x))). A and B are frozen, as large as the largest module, and each module uses
their upper left part. Source: peft/tuners/vera/model.py and layer.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from zerolora.errors import UserError
from zerolora.methods.adapter_check import ImpliedShapes, Shapes
from zerolora.methods.method import (
    TrainedParameters,
    Update,
    check_shape,
    named_modules,
    saved_factors,
    saved_tensors,
)
from zerolora.methods.peft_format import (
    PREFIX,
    all_linear,
    check_names,
    conv1d_paths,
    outside,
    peft_model,
    peft_state,
    saved_name,
)
from zerolora.methods.peft_method import PeftMethod
from zerolora.methods.updates import Replacement
from zerolora.tensor_file import rows_of, whole

if TYPE_CHECKING:
    import torch

    from zerolora.config.method_sections import MethodSections
    from zerolora.model.projections import Projections
    from zerolora.model.spec import ModelSpec, Module
    from zerolora.model.tracer import Value
    from zerolora.tensor_file import Factor

FIRST, SECOND = "base_model.vera_A", "base_model.vera_B"
"""Names of the shared matrices in an adapter file: [r, most inputs] and [most outputs, r]."""
MARK = ".vera_lambda_"
DEFAULT_RANK = 256
"""peft's default."""


def _shapes(
    config: Mapping[str, Any], model: "ModelSpec", module: "Module", path: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the tensors of a module."""
    yield "vera_lambda_b", (module.outputs,)
    yield "vera_lambda_d", (config.get("r", DEFAULT_RANK),)


def _shared(config: Mapping[str, Any], adapted: "Sequence[Module]") -> Shapes:
    """Return name and shape of the tensors that all adapted modules share."""
    r = config.get("r", DEFAULT_RANK)
    inputs, outputs = max(each.inputs for each in adapted), max(each.outputs for each in adapted)
    return {FIRST: (r, inputs), SECOND: (outputs, r)}


@dataclass(frozen=True)
class VeraMethod(PeftMethod):
    """VeRA."""

    name: ClassVar[str] = "vera"
    rate: ClassVar[float] = 10.0  # 4e-3, and 4e-4 of LoRA, in arXiv 2310.11454
    sections: ClassVar[tuple[str, ...]] = ("vera",)
    peft_type: ClassVar[str | None] = "VERA"
    meaning: ClassVar[Mapping[str, str]] = {"r": "vera.r", "projection_prng_key": "vera.projection_seed"}
    trains_rows: ClassVar[bool] = False
    shapes: ClassVar[ImpliedShapes] = ImpliedShapes(_shapes, _shared)

    r: int = 256
    """Rank of the shared matrices."""
    targets: str | tuple[str, ...] = "all-linear"
    """all-linear, or names or ends of linear modules' paths."""
    dropout: float = 0.0
    """Dropout before the first matrix."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained and saved in full."""

    @property
    def drops(self) -> bool:
        """Whether dropout is applied to the adapter's input."""
        return self.dropout > 0

    def parameters(self, model: "ModelSpec", width: int) -> TrainedParameters:
        """Return the vectors as trained, the base model and the shared matrices as frozen."""
        adapted = self._targets(model)
        tensors = [size for module in adapted for _ in range(module.count) for size in (self.r, module.outputs)]
        factored = sum(tensors) + saved_factors(model, self.modules_to_save)
        tensors += saved_tensors(model, self.modules_to_save)
        shared = self.r * (max(each.inputs for each in adapted) + max(each.outputs for each in adapted))
        ranks = tuple((module.path, self.r) for module in adapted)
        frozen = model.parameters + shared
        return TrainedParameters(frozen, sum(tensors), float(frozen * width), ranks, max(tensors), factored)

    def _targets(self, model: "ModelSpec") -> "list[Module]":
        adaptable = [module for module in model.modules if module.kind in ("linear", "conv1d")]
        if self.targets != "all-linear":
            names = (self.targets,) if isinstance(self.targets, str) else self.targets
            return named_modules(model, names, "train.vera.targets", adaptable)
        if linear := [module for module in adaptable if not module.left_out]:
            return linear
        raise UserError(f"train.vera.targets: a {model.family} has no linear module; set method: full")

    def project(self, layer: "Projections", module: "Module", role: str, value: "Value") -> "Value":
        """Trace result + b ∘ (B(d ∘ (A x))) (peft/tuners/vera/layer.py, Linear.forward)."""
        result = layer.frozen(value, module)
        if module.path not in layer.ranks:
            return result
        saves, before = layer.step.saves_inputs, result.width
        value = layer.cast(value, layer.trained.width)
        value = layer.dropped(value) if self.drops else value
        first = layer.linear(value, module.inputs, self.r, saves=saves)
        scaled = layer.mul(layer.broadcast(layer.of(layer.adapter_weight(self.r)), first), first)
        second = layer.linear(scaled, self.r, module.outputs, saves=saves)
        update = layer.mul(layer.broadcast(layer.of(layer.adapter_weight(module.outputs)), second), second)
        return layer.cast(layer.add(result, update), before)

    @classmethod
    def of(cls, settings: "MethodSections") -> Self:
        vera = settings.vera
        targets = vera.targets if isinstance(vera.targets, str) else tuple(vera.targets)
        return cls(vera.r, targets, vera.dropout, tuple(vera.modules_to_save))

    @staticmethod
    def build(model: Any, settings: "MethodSections", rows: Sequence[int] = ()) -> Any:
        import torch
        from peft import VeraConfig

        assert not rows, "config/run_checks.py refuses added tokens with vera"
        vera = settings.vera
        if outside(model):
            raise UserError(
                "train.method: peft's VeRA adapts all parts of a model, and this one has parts beside the language "
                "model; use lora"
            )
        config = VeraConfig(
            task_type="CAUSAL_LM",
            r=vera.r,
            target_modules=all_linear(model) if vera.targets == "all-linear" else vera.targets,
            projection_prng_key=vera.projection_seed,
            save_projection=True,
            vera_dropout=vera.dropout,
            d_initial=vera.d_initial,
            modules_to_save=list(vera.modules_to_save) or None,
        )
        with torch.device("cpu"):  # peft draws with a CPU generator, also for a model on the meta device
            wrapped = peft_model(model, config, "train.vera", vera.targets)
        check_names(wrapped, "train.vera", vera.targets, vera.modules_to_save)
        shared = wrapped.base_model
        if any(each["default"].is_meta for each in (shared.vera_A, shared.vera_B)):
            # A rank with its weights on the meta device has moved the matrices there.
            for buffers, drawn in zip((shared.vera_A, shared.vera_B), _drawn(wrapped), strict=True):
                buffers["default"] = drawn.to(buffers["default"].dtype)
        return wrapped

    @staticmethod
    def published(model: Any, trained: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Return the vectors and the drawn matrices, so that readers need not draw them."""
        first, second = _drawn(model)
        return peft_state(model, trained | {f"{FIRST}.default": first, f"{SECOND}.default": second})

    @staticmethod
    def is_untrained(name: str, tensor: "torch.Tensor") -> bool:
        return name.endswith(f"{MARK}b") and not bool(tensor.any())

    @staticmethod
    def updates_of(tensors: "Mapping[str, Factor]", config: dict[str, Any], model: Any) -> dict[str, Update]:
        """Return the update of each weight that an adapter changes."""
        transposed = conv1d_paths(model)
        result: dict[str, Update] = {}
        for name, tensor in tensors.items():
            module, mark, part = name.removeprefix(PREFIX).partition(MARK)
            if name in (FIRST, SECOND) or part == "d":
                continue
            if not mark:
                result[saved_name(name)] = Replacement(saved_name(name), tensor)
                continue
            weight = f"{module}.weight"
            scales = tensors[f"{PREFIX}{module}{MARK}d"], tensor
            result[weight] = SharedProduct(weight, tensors[FIRST], tensors[SECOND], *scales, module in transposed)
        return result


@dataclass(frozen=True)
class SharedProduct(Update):
    """Adds (b ∘ B)(d ∘ A) to a weight, with the parts of A and B of its size."""

    weight: str
    first: "Factor"
    """A: [r, most inputs]"""
    second: "Factor"
    """B: [most outputs, r]"""
    scale: "Factor"
    """d: [r]"""
    outputs: "Factor"
    """b: [outputs]"""
    transposed: bool
    """The weight is [inputs, outputs]."""

    def check(self, shape: tuple[int, ...]) -> None:
        outputs = self.outputs.shape[0]
        inputs = min(shape[0 if self.transposed else -1], self.first.shape[1])
        check_shape(self.weight, shape, (inputs, outputs) if self.transposed else (outputs, inputs))

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        """Add the product (peft/tuners/vera/layer.py, Linear.get_delta_weight)."""
        last, columns = first + len(rows), rows.shape[1]
        left = whole(self.first).float() * whole(self.scale).float().unsqueeze(1)
        if self.transposed:
            right = rows_of(self.second, 0, columns).float() * whole(self.outputs).float().unsqueeze(1)
            rows.add_((right @ left[:, first:last]).T)
        else:
            right = rows_of(self.second, first, last).float() * rows_of(self.outputs, first, last).float().unsqueeze(1)
            rows.add_(right @ left[:, :columns])


def _drawn(model: Any) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the shared fp32 matrices of peft's model on the host, as peft draws them from the config's key."""
    import torch
    from peft.tuners.vera.model import _kaiming_init

    config, shared = model.peft_config["default"], model.base_model
    generator = torch.Generator("cpu").manual_seed(config.projection_prng_key)
    with torch.device("cpu"):
        first = _kaiming_init(tuple(shared.vera_A["default"].shape), generator)
        return first, _kaiming_init(tuple(shared.vera_B["default"].shape), generator)
