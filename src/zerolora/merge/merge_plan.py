"""Plan a merge, tensor by tensor, from headers and shapes: no weight is read."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zerolora.errors import UserError
from zerolora.methods.method import Update
from zerolora.tensor_file import TYPES, StoredTensor, TensorFile

FLOATS = ("F32", "F16", "BF16")
"""Types of unquantized weights, as safetensors names them."""


class BaseNames(Protocol):
    """The mapping between the tensors in the base's files and the weights of the merged model."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the merged model's weights, by name."""

    def of_model(self, stored: str) -> tuple[str, bool]:
        """Return the weight that a stored tensor is, or is a part of, and whether it needs conversion."""

    def converted(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Convert stored tensors to weights."""

    def stored(self, weights: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Convert weights back to the stored tensors of these names."""


@dataclass(frozen=True)
class MergeUnit:
    """Stored tensors that are merged together: one, or all that transformers converts to a weight."""

    stored: tuple[StoredTensor, ...]
    updates: Mapping[str, Update]
    """Updates by weight; at most one for an unconverted tensor."""
    rows: int | None = None
    """Rows of the result, if more than the stored ones."""
    converted: bool = False
    copy: str | None = None
    """Name of an additional tensor to write."""


@dataclass(frozen=True)
class MergePlan:
    """The units of a base model's files, and the headers of the output files."""

    units: Mapping[str, MergeUnit]
    """Units by stored tensor; a tensor without one is copied."""
    files: tuple[tuple[TensorFile, TensorFile], ...]
    """Header of each of the base's files, and of its output file."""
    names: BaseNames
    copies: Mapping[Path, tuple[MergeUnit, ...]] = field(default_factory=dict)
    """Additional tensors of an output file, by the path of the base's file: copies of weights that the base shares."""
    more_parameters: int = 0
    more_bytes: int = 0
    """Bytes of the rows and tensors that the base lacks."""
    updated: frozenset[str] = field(default_factory=frozenset)
    """Weights with an update."""

    def missing(self, updates: Mapping[str, Update]) -> list[str]:
        """Return the weights of non-optional `updates` that the files lack."""
        return sorted(name for name in updates.keys() - self.updated if not updates[name].optional)

    @property
    def nbytes(self) -> int:
        """Total bytes of the output files."""
        return sum(target.nbytes for _, target in self.files)


def plan_merge(
    files: Iterable[TensorFile],
    names: BaseNames,
    updates: Mapping[str, Update],
    directory: Path = Path(),
    rows_before: int | None = None,
    untied: Mapping[str, str] | None = None,
) -> MergePlan:
    """Return the plan that merges `updates` into the tensors of `files`, with output in `directory`.

    `names` has the shapes of the merged model. `rows_before` is the vocabulary size before tokens were added, None if
    none were. `untied` has the source weight of each new tensor. Raises UserError if an update does not fit its weight,
    the weight is quantized, cannot be converted back, or is stored with fewer rows than the model has.
    """
    files = list(files)
    units: dict[str, MergeUnit] = {}
    parts: dict[str, list[StoredTensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    copies: dict[Path, list[MergeUnit]] = {}
    lacking = _lacking(files, names, untied or {})
    more_parameters = more_bytes = 0
    for file in files:
        for name, stored in file.tensors.items():
            weight, converted = names.of_model(name)
            if converted:
                parts.setdefault(weight, []).append(stored)
                continue
            result = {weight: updates[weight]} if weight in updates else {}
            rows = _more_rows(stored, names.shapes.get(weight))
            if rows and stored.shape[0] != rows_before:
                raise UserError(
                    f"{stored.path}: {name} has {stored.shape[0]} rows, and the model of config.json has "
                    f"{rows_before or rows} (vocab_size); bring the config.json that belongs to these weights"
                )
            shape = (rows, *stored.shape[1:]) if rows else stored.shape
            for copy in lacking.pop(weight, ()):
                changed = {copy: updates[copy]} if copy in updates else {}
                for update in changed.values():
                    _check_type(stored)
                    update.check(shape)
                copies.setdefault(file.path, []).append(MergeUnit((stored,), changed, rows, copy=copy))
                size = shape[0] * (stored.nbytes // stored.shape[0])
                more_bytes += size
                more_parameters += size // TYPES[stored.kind][1]
                if rows:
                    shapes[copy] = shape
            if not result and not rows:
                continue
            _check_type(stored)
            for update in result.values():
                update.check(shape)
            units[name] = MergeUnit((stored,), result, rows)
            if rows:
                shapes[name] = shape
                added = (rows - stored.shape[0]) * (stored.nbytes // stored.shape[0])
                more_bytes += added
                more_parameters += added // TYPES[stored.kind][1]
    for name, (copy, *_) in lacking.items():
        raise UserError(
            f"{files[0].path.parent}: no file has {name} by itself, and the adapter makes {copy} another weight; use "
            "the adapter with its base unmerged"
        )
    for group in parts.values():
        unit = _converted(tuple(group), names, updates)
        units |= {stored.name: unit for stored in group} if unit.updates else {}
    return MergePlan(
        units,
        tuple((file, _target(file, directory, shapes, copies.get(file.path, []))) for file in files),
        names,
        {path: tuple(added) for path, added in copies.items()},
        more_parameters,
        more_bytes,
        frozenset(
            weight
            for unit in [*units.values(), *(unit for added in copies.values() for unit in added)]
            for weight in unit.updates
        ),
    )


def _lacking(files: list[TensorFile], names: BaseNames, untied: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the copies of weights that the files lack, by weight."""
    written = {names.of_model(name)[0] for file in files for name in file.tensors} if untied else set()
    result: dict[str, list[str]] = {}
    for copy, name in untied.items():
        if copy not in written:
            result.setdefault(name, []).append(copy)
    return result


def _target(
    file: TensorFile, directory: Path, shapes: Mapping[str, tuple[int, ...]], copies: Iterable[MergeUnit]
) -> TensorFile:
    """Return the header of the output file, in `directory`, for a file of the base."""
    added = {unit.copy: unit.stored[0] for unit in copies if unit.copy}
    return file.resized(directory / file.path.name, shapes, added)


def _converted(group: tuple[StoredTensor, ...], names: BaseNames, updates: Mapping[str, Update]) -> MergeUnit:
    """Return the unit of tensors that convert to one or several weights, after a trial on the meta device."""
    import torch

    kinds = {each.name: TYPES.get(each.kind, ("uint8", 1))[0] for each in group}
    empty = {
        each.name: torch.empty(each.shape, dtype=getattr(torch, kinds[each.name]), device="meta") for each in group
    }
    with _conversion_errors(group[0]):
        weights = names.converted(empty)
    result = {weight: updates[weight] for weight in weights if weight in updates}
    if result:
        for stored in group:
            _check_type(stored)
        for weight, update in result.items():
            update.check(tuple(weights[weight].shape))
        with _conversion_errors(group[0]):
            back = names.stored(weights, list(empty))
            assert {name: tensor.shape for name, tensor in back.items()} == {k: v.shape for k, v in empty.items()}
    return MergeUnit(group, result, converted=True)


@contextlib.contextmanager
def _conversion_errors(stored: StoredTensor) -> Iterator[None]:
    """Turn any error of a conversion into a UserError: transformers raises many types."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{stored.path}: {stored.name} is stored in a form that merge cannot convert back ({type(error).__name__}: "
            f"{why:.160}); use targets without it, or save the model with save_pretrained"
        ) from None


def _check_type(stored: StoredTensor) -> None:
    """Raise UserError if a stored tensor is quantized."""
    if stored.kind not in FLOATS:
        raise UserError(
            f"{stored.path}: {stored.name} is stored as {stored.kind}, codes of a quantized weight, to which "
            f"nothing can be added; take the base model as it was before, in {', '.join(FLOATS)}"
        )


def _more_rows(stored: StoredTensor, shape: tuple[int, ...] | None) -> int | None:
    """Return the model's rows of a weight if fewer are stored: an embedding or head with added tokens."""
    if not shape or not stored.shape or shape[0] <= stored.shape[0] or shape[1:] != stored.shape[1:]:
        return None
    return shape[0]
