"""What a format says of a checkpoint: the weights that its stored tensors are, each from tensors of its own."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerolora.errors import UserError, shown
from zerolora.tensor_file import StoredTensor

if TYPE_CHECKING:
    import torch

INSTEAD = "use the checkpoint in bf16, fp16 or fp32 that it was made of"
BLOCK = 1 << 22
"""Numbers to dequantize at a time; some ten temporary tensors of up to 8 bytes a number exist at once."""
ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "input_scale_ub"),
    *("output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale"),
)
"""Ends of names of scales for activations and for the key-value cache, which change no weight. A weight of such a name
would be missed in the result (model/base_check.py)."""
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Weight:
    """A weight, dequantized."""

    name: str
    shape: tuple[int, ...]
    stored: tuple[StoredTensor, ...]
    """What it is made of, its codes first; no other weight uses these tensors."""
    blocks: "Callable[[], Iterator[torch.Tensor]]"
    """Yields its numbers in fp32, some at a time, in the order in which they are stored."""


@dataclass(frozen=True)
class Stated:
    """A quantization_config."""

    path: Path
    """The config.json that has it."""
    values: Mapping[str, Any]
    key: str = "quantization_config"

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise UserError for the value of a key."""
        raise UserError(f"{self.path}: {self.key}.{key} is {shown(self.values.get(key))}, {why}; {INSTEAD}")

    def one_of(self, key: str, expected: Iterable[Any], default: Any = None) -> Any:
        """Return the value of a key, or `default` without one. Raises UserError unless it is among `expected`."""
        value = self.values.get(key, default)
        if not any(value == each and type(value) is type(each) for each in expected):
            self.refuse(key, f"and only {', '.join(shown(each) for each in expected)} can be converted to bf16")
        return value

    def only(self, known: Iterable[str]) -> None:
        """Raise UserError for a key that is not among `known`: it might change the numbers."""
        for key in sorted(self.values.keys() - set(known)):
            if self.values[key] is not None:
                self.refuse(key, f"a key that is not known of {shown(self.values['quant_method'])}")

    def part(self, key: str, values: Mapping[str, Any]) -> "Stated":
        """Return the object under a key."""
        return Stated(self.path, values, f"{self.key}.{key}")


@dataclass
class Checkpoint:
    """The stored tensors of a quantized checkpoint by name, from which a format takes what it knows."""

    stated: Stated
    stored: Mapping[str, StoredTensor]
    weights: list[Weight] = field(default_factory=list)

    def needs(self, name: str, of: StoredTensor, kinds: Iterable[str], shape: tuple[int, ...] | None) -> StoredTensor:
        """Return the tensor `name` that belongs to the codes `of`.

        Raises UserError if it is absent or not of one of these types, or of another shape, if one is given.
        """
        result = self.stored.get(name)
        if result is None:
            raise UserError(f"{of.path}: {shown(of.name)} is stored as {of.kind}, and no file has {name}; {INSTEAD}")
        if result.kind not in kinds or (shape is not None and result.shape != shape):
            expected = f"{' or '.join(kinds)}{f' and {list(shape)}' if shape is not None else ''}"
            raise UserError(
                f"{result.path}: {shown(name)} is {result.kind} and {list(result.shape)}; {expected} is expected, by "
                f"{self.stated.key} and {shown(of.name)}; {INSTEAD}"
            )
        return result

    def ends(self, end: str) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the tensors whose names have this end, with what is before it."""
        for name, each in self.stored.items():
            if name.endswith(end):
                yield name.removesuffix(end), each


def part(stored: StoredTensor, number: int) -> StoredTensor:
    """Return one of the tensors that are stacked in the first dimension of another."""
    size = stored.nbytes // stored.shape[0]
    start = stored.start + number * size
    return StoredTensor(stored.path, stored.name, stored.kind, stored.shape[1:], start, start + size)


def spans(rows: int, columns: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield first and last of blocks of about BLOCK numbers, of a multiple of `multiple` rows but for the last."""
    step = max(BLOCK // max(columns, 1) // multiple, 1) * multiple
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
