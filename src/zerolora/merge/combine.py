"""The update of several adapters, each times a weight: the sum of their weighted updates.

Source: peft/tuners/lora/model.py, add_weighted_adapter with combination_type "cat", whose merged model is the same bit
for bit; "linear" multiplies sums of factors, which is not the sum of the adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolora.errors import UserError
from zerolora.methods.lora import ExpertProducts, Product, Replacement, Then
from zerolora.methods.method import Update
from zerolora.methods.registry import of_directory
from zerolora.tensor_file import whole

if TYPE_CHECKING:
    import torch


def updates_of(adapters: Sequence[tuple[Path, float]], model: Any) -> dict[str, Update]:
    """Return what adapters, each times its weight, make of the weights of `model`, the base on the meta device.

    Raises UserError if several are given and one holds more than LoRA's factors.
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
                    f"{directory}: has a copy of the base's {name} beside its factors, which cannot be added with a "
                    "weight; save the adapter with save_embedding_layers=False, or merge it by itself"
                )
            if not plain:
                raise UserError(
                    f"{directory}: {name} is not changed by LoRA factors alone, so it cannot be added with a weight; "
                    "merge this adapter by itself"
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
    """The sum of B·A·scale·weight of several adapters, as one product of factors side by side."""

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
