"""The updates of a weight: by LoRA's factors, by the factors of experts, by a trained weight, or by several of them."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerolora.errors import UserError
from zerolora.methods.method import Update, check_shape
from zerolora.tensor_file import StoredTensor, rows_of, whole

if TYPE_CHECKING:
    import torch

    from zerolora.tensor_file import Factor

KEPT = 32
"""Factors in memory from one block of rows to the next: more than threads use."""
SMALL = 2**23
"""Maximum bytes of a factor that is read whole, although a block needs only some of its rows."""


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
