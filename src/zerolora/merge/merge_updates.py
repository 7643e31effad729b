"""The updates of a merge: weighted sums of adapters, weights as QLoRA quantized them, and untied shared weights."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.files import read_object, write_json
from zerolora.merge.stream import apply
from zerolora.methods.method import Update
from zerolora.methods.quantized_base import (
    BaseQuantization,
    load_library,
    quantization_of,
    quantized_weights,
    unpacked,
)
from zerolora.methods.registry import of_directory
from zerolora.methods.updates import ExpertProducts, Product, Replacement, Then
from zerolora.tensor_file import equal, whole

if TYPE_CHECKING:
    import torch

TIE = "tie_word_embeddings"


def updates_of(adapters: Sequence[tuple[Path, float]], model: Any) -> dict[str, Update]:
    """Return the sum of adapters, each times its weight, as updates of `model`, the base on the meta device.

    Source: peft/tuners/lora/model.py, add_weighted_adapter with combination_type "cat"; the merged models are equal bit
    for bit. ("linear" multiplies sums of factors, which is not the sum of the adapters.) Raises UserError if one of
    several adapters has more than LoRA factors.
    """
    if len(adapters) == 1 and adapters[0][1] == 1:
        directory = adapters[0][0]
        return of_directory(directory).updates(directory, model)
    result: dict[str, list[tuple[Update, float]]] = {}
    for directory, weight in adapters:
        for name, update in of_directory(directory).updates(directory, model).items():
            plain = isinstance(update, ExpertProducts) or (
                isinstance(update, Product) and "magnitude_vector" not in update.parts
            )
            if isinstance(update, Then) and isinstance(update.updates[0], Replacement):
                raise UserError(
                    f"{directory}: has a copy of the base's {name} beside its factors, and a copy cannot be weighted; "
                    "save the adapter with save_embedding_layers=False, or merge it alone"
                )
            if not plain:
                raise UserError(
                    f"{directory}: the update of {name} has more than LoRA factors, so it cannot be weighted; merge "
                    "this adapter alone"
                )
            result.setdefault(name, []).append((update, weight))
    return {name: _sum(each) for name, each in result.items()}


def _sum(parts: list[tuple[Update, float]]) -> Update:
    products = [(update, weight) for update, weight in parts if isinstance(update, Product)]
    if len(products) == len(parts):
        return WeightedProducts(products[0][0].weight, tuple(products))
    scaled = [replace(each, scale=each.scale * weight) for each, weight in parts if isinstance(each, ExpertProducts)]
    return Then(tuple(scaled))


@dataclass(frozen=True)
class WeightedProducts(Update):
    """The sum of B·A·scale·weight over adapters, as one product of concatenated factors."""

    weight: str
    products: tuple[tuple[Product, float], ...]

    def check(self, shape: tuple[int, ...]) -> None:
        for product, _ in self.products:
            product.check(shape)

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        """Add the product."""
        import torch

        factors = [(*product.factors, weight, product.scale) for product, weight in self.products]
        left = torch.cat([whole(one).float() * weight * scale for one, _, weight, scale in factors])
        right = torch.cat([whole(other).float() for _, other, _, _ in factors], dim=1)
        joined: dict[str, Any] = {"A": left, "B": right}
        if "embedding_A" in self.products[0][0].parts:
            joined = {"embedding_A": left, "embedding_B": right}
        Product(self.weight, joined, 1.0, self.products[0][0].transposed).apply(rows, first)


def requantized(updates: Mapping[str, Update], adapters: Sequence[Path], model: Any) -> dict[str, Update]:
    """Return updates that start from the weights as training quantized them, for all modules that were quantized.

    A QLoRA adapter compensates for quantization, so it fits the original weights less well (methods/quantized_base.py).
    Raises UserError if an adapter does not record the quantization, two differ, or bitsandbytes is not installed.
    """
    first, *others = adapters
    quantization = quantization_of(first)
    for other in others:
        if (its := quantization_of(other)) != quantization:
            raise UserError(
                f"--dequantized: {other} was trained on a base quantized as {_described(its)}, and {first} as "
                f"{_described(quantization)}; merge them into the original base, or one alone"
            )
    load_library()
    return dict(updates) | {
        name: Requantized(quantization, updates.get(name), transposed)
        for name, transposed in quantized_weights(model, quantization.experts).items()
    }


def _described(quantization: BaseQuantization) -> str:
    values = asdict(quantization)
    experts = values.pop("experts")
    return ", ".join([*(f"{key} {value}" for key, value in values.items()), *(["with experts"] if experts else ())])


@dataclass(frozen=True)
class Requantized(Update):
    """An update of the quantized and dequantized weight."""

    quantization: BaseQuantization
    update: Update | None
    transposed: bool
    """The weight is [inputs, outputs], and its transpose was quantized."""

    @property
    def by_rows(self) -> bool:
        """False: blocks of a 4-bit weight cross rows, and their constants are quantized together."""
        return False

    def check(self, shape: tuple[int, ...]) -> None:
        if self.update:
            self.update.check(shape)

    def apply(self, rows: "torch.Tensor", first: int) -> None:
        """Quantize, dequantize, then update."""
        rows.copy_(unpacked(rows, self.quantization, self.transposed))
        if self.update:
            apply(self.update, rows, first)


def untied_copies(
    updates: Mapping[str, Update], tied: Mapping[str, str], stored: Container[str]
) -> tuple[dict[str, Update], dict[str, str]]:
    """Return the updates to apply, and the entries of `tied`, weight by copy, that are two weights after the merge.

    peft adapts or saves either the embedding or the head and keeps the base's weight for the other (peft#2777), so a
    merge into the shared weight would change both; Zamba's layers share a transformer, of which each has an adapter of
    its own. Weights stay shared if all updates are equal (ensure_weight_tying). Otherwise none is, since a class unties
    all or none. `stored` has the weights in the base's files.
    """
    if any(_differ(updates.get(name), updates.get(copy)) for copy, name in tied.items()):
        return dict(updates), dict(tied)
    equal = {copy for copy in tied if copy in updates and not updates[copy].optional and copy not in stored}
    return {name: update for name, update in updates.items() if name not in equal}, {}


def _differ(one: Update | None, other: Update | None) -> bool:
    """Return whether the updates of a weight and of its copy need two weights."""
    if (one is None and other is None) or (other is not None and other.optional):
        return False
    return one is None or other is None or not _alike(one, other)


def write_untied(model: Path) -> None:
    """Set tie_word_embeddings in the config.json of directory `model` to false."""
    config = read_object(model / "config.json", "save_pretrained")
    for part in (config, config.get("text_config") or {}):
        if part is config or TIE in part:
            part[TIE] = False
    write_json(model / "config.json", config)


def _alike(one: Update, other: Update) -> bool:
    """Return whether two updates of one weight have the same result."""
    if isinstance(one, Then) and isinstance(other, Then):
        return len(one.updates) == len(other.updates) and all(map(_alike, one.updates, other.updates))
    if isinstance(one, Replacement) and isinstance(other, Replacement):
        return equal(one.trained, other.trained)
    if not (isinstance(one, Product) and isinstance(other, Product)) or one.scale != other.scale:
        return False
    if "magnitude_vector" in one.parts or "magnitude_vector" in other.parts:
        return False  # one has a norm per column, the other per row
    (left, right), (first, second) = one.factors, other.factors
    if one.turned == other.turned:
        return equal(left, first) and equal(right, second)
    return equal(whole(left).T, second) and equal(whole(right).T, first)
