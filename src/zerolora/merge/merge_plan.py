"""What a merge does with each stored tensor of the base, known from headers and shapes before a number is read."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zerolora.errors import UserError
from zerolora.methods.method import Update
from zerolora.tensor_file import TYPES, StoredTensor, TensorFile

FLOATS = ("F32", "F16", "BF16")
"""The types of a weight that is not quantized, as safetensors writes them."""


class BaseNames(Protocol):
    """How the weights of the merged model are called in the base's files, and how tensors there become weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the merged model's weights, by name."""

    def of_model(self, stored: str) -> tuple[str, bool]:
        """Return the weight that a stored tensor is, or is a part of; and whether it has to be converted."""

    def converted(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the weights that are made of these stored tensors."""

    def stored(self, weights: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Return the tensors, of these names, that `converted` made the weights of."""


@dataclass(frozen=True)
class MergeUnit:
    """Stored tensors that are merged together: one, or all that transformers makes a weight of."""

    stored: tuple[StoredTensor, ...]
    updates: Mapping[str, Update]
    """By the weight that each is of; of a tensor that is not converted, one or none."""
    rows: int | None = None
    """Rows of the result, if the model has more than are stored."""
    converted: bool = False
    copy: str | None = None
    """The name of a further tensor that is written, beside the stored one."""


@dataclass(frozen=True)
class MergePlan:
    """The units of a base model's files, and the files that are written."""

    units: Mapping[str, MergeUnit]
    """By the name of each stored tensor; a tensor without one is copied."""
    files: tuple[tuple[TensorFile, TensorFile], ...]
    """The header of each file of the base, and the one that is written."""
    names: BaseNames
    copies: Mapping[Path, tuple[MergeUnit, ...]] = field(default_factory=dict)
    """What is written behind the tensors of a file of the base, by its path: the head of a base that shared its
    weight."""
    more_parameters: int = 0
    more_bytes: int = 0
    """Of rows and tensors that the base has not."""
    updated: frozenset[str] = field(default_factory=frozenset)
    """The weights of the model that an update is applied to."""

    def missing(self, updates: Mapping[str, Update]) -> list[str]:
        """Return the weights of `updates` that the files do not have, and should."""
        return sorted(name for name in updates.keys() - self.updated if not updates[name].optional)

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files that are written."""
        return sum(target.nbytes for _, target in self.files)


def plan_merge(
    files: Iterable[TensorFile],
    names: BaseNames,
    updates: Mapping[str, Update],
    place: Path = Path(),
    rows_before: int | None = None,
    untied: Mapping[str, str] | None = None,
) -> MergePlan:
    """Return the plan that merges `updates` into the tensors of `files`, to be written to the directory `place`.

    `names` has the shapes of the merged model; `rows_before` are those of its vocabulary before tokens were added, None
    if none were. `untied`: the weight that a new tensor is made of, by the tensor's name. Raises UserError if an update
    does not fit its weight, or the weight is stored in a form that nothing can be added to or that it cannot be brought
    back to, or with fewer rows than the model has.
    """
    files = list(files)
    units: dict[str, MergeUnit] = {}
    parts: dict[str, list[StoredTensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    copies: dict[Path, list[MergeUnit]] = {}
    written = {names.of_model(name)[0] for file in files for name in file.tensors} if untied else set()
    lacking = {name: copy for copy, name in (untied or {}).items() if copy not in written}
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
            if copy := lacking.get(weight):
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
    for group in parts.values():
        unit = _converted(tuple(group), names, updates)
        units |= {stored.name: unit for stored in group} if unit.updates else {}
    return MergePlan(
        units,
        tuple((file, _target(file, place, shapes, copies.get(file.path, []))) for file in files),
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


def _target(
    file: TensorFile, place: Path, shapes: Mapping[str, tuple[int, ...]], copies: Iterable[MergeUnit]
) -> TensorFile:
    """Return the header of the file that is written for one of the base's, to the directory `place`."""
    added = {unit.copy: unit.stored[0] for unit in copies if unit.copy}
    return file.resized(place / file.path.name, shapes, added)


def _converted(group: tuple[StoredTensor, ...], names: BaseNames, updates: Mapping[str, Update]) -> MergeUnit:
    """Return the unit of tensors that are one weight, or several, of the model; tried on the meta device."""
    import torch

    kinds = {each.name: TYPES.get(each.kind, ("uint8", 1))[0] for each in group}
    empty = {
        each.name: torch.empty(each.shape, dtype=getattr(torch, kinds[each.name]), device="meta") for each in group
    }
    with _bringing_back(group[0]):
        weights = names.converted(empty)
    result = {weight: updates[weight] for weight in weights if weight in updates}
    if result:
        for stored in group:
            _check_type(stored)
        for weight, update in result.items():
            update.check(tuple(weights[weight].shape))
        with _bringing_back(group[0]):
            back = names.stored(weights, list(empty))
            assert {name: tensor.shape for name, tensor in back.items()} == {k: v.shape for k, v in empty.items()}
    return MergeUnit(group, result, converted=True)


@contextlib.contextmanager
def _bringing_back(stored: StoredTensor) -> Iterator[None]:
    """Turn what a conversion raises into a UserError; transformers raises different errors for what it cannot do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"{stored.path}: {stored.name} is stored in a form that merge cannot bring back ({type(error).__name__}: "
            f"{why:.160}); write targets without it, or save the model with save_pretrained"
        ) from None


def _check_type(stored: StoredTensor) -> None:
    """Raise UserError if a stored tensor holds other numbers than those of a weight."""
    if stored.kind not in FLOATS:
        raise UserError(
            f"{stored.path}: {stored.name} is stored as {stored.kind}, codes of a quantized weight, to which "
            f"nothing can be added; take the base model as it was before, in {', '.join(FLOATS)}"
        )


def _more_rows(stored: StoredTensor, shape: tuple[int, ...] | None) -> int | None:
    """Return the rows of a weight that has more in the model than are stored: embedding and head, with added tokens."""
    if not shape or not stored.shape or shape[0] <= stored.shape[0] or shape[1:] != stored.shape[1:]:
        return None
    return shape[0]
