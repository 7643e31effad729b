"""LoRA (arXiv 2106.09685): two factors of rank r beside a frozen linear module.

Sources: section 4.1 of the paper; peft/tuners/lora/model.py and layer.py for targets and trained tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.methods import lora_updates
from zerolora.methods.adapter_check import MAGNITUDE, ImpliedShapes
from zerolora.methods.adapter_config import rank_and_alpha
from zerolora.methods.listed_experts import stacked
from zerolora.methods.lora_init import doubled, is_start
from zerolora.methods.low_rank import LowRank
from zerolora.methods.method import Update
from zerolora.methods.peft_format import adapted_paths, check_names, check_pattern, excluded, peft_model, peft_targets
from zerolora.methods.peft_method import PeftMethod
from zerolora.methods.token_rows import check_targets, row_options

if TYPE_CHECKING:
    import torch

    from zerolora.config.method_sections import MethodSections
    from zerolora.model.spec import ModelSpec, Module
    from zerolora.tensor_file import Factor, StoredTensor


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

        from zerolora.compat.peft_patches import targets_as_given

        lora = settings.lora
        targets = peft_targets(model, lora.targets)
        joined = targets.factors(lora.rank_pattern)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated as int, used as a factor
            lora_dropout=lora.dropout,
            use_rslora=lora.rank_stabilized,
            target_modules=targets.modules,
            target_parameters=targets.parameters or None,
            exclude_modules=excluded(model),
            rank_pattern=lora.rank_pattern | {key: lora.r * factor for key, factor in joined.items()},
            alpha_pattern=lora.alpha_pattern | {key: lora.alpha * factor for key, factor in joined.items()},
            modules_to_save=list(lora.modules_to_save) or None,
            bias="none",
            **row_options(model, rows, lora.modules_to_save),
            **cls.options,
        )
        check_targets(model, config)
        with targets_as_given():
            wrapped = peft_model(model, config, "train.lora", lora.targets)
        named = targets.modules if isinstance(lora.targets, list) else ""
        check_names(wrapped, "train.lora", named, lora.modules_to_save)
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
        modules, parameters = method.targets_in(model)
        return not parameters and all(module.kind == "linear" for module in modules)

    @staticmethod
    def is_untrained(name: str, tensor: "torch.Tensor") -> bool:
        return "lora_B" in name and (not bool(tensor.any()) or is_start(tensor))

    @staticmethod
    def of_class(
        tensors: "Mapping[str, StoredTensor]", config: dict[str, Any], model: Any
    ) -> "tuple[Mapping[str, StoredTensor], dict[str, Any]]":
        return stacked(tensors, config, model)

    @staticmethod
    def updates_of(tensors: "Mapping[str, Factor]", config: dict[str, Any], model: Any) -> dict[str, Update]:
        return lora_updates.updates_of(tensors, config, model)


@dataclass(frozen=True)
class LoraMethod(TrainedLowRank):
    """LoRA."""

    name: ClassVar[str] = "lora"
    quantized_form: ClassVar[str | None] = "qlora"
