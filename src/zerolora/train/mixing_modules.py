"""Modules that mix the rows of a packed row, computed row by row.

A convolution over tokens, a recurrent state or an attention whose mask knows nothing of rows carries one row into the
next. Which modules do is found on the model itself: where the second row enters a module as before and leaves it
changed, after another first row. Such a module is called once for each row, with that row's part of its inputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from zerolora.errors import UserError
from zerolora.train.attention import lengths

FIRST = 7
"""Tokens of the first row."""
PACKED_ROWS = (11, 13, 17, 19, 23)
"""How many packed rows the trial may have: a number that no first dimension of another meaning is a multiple of."""
LONGEST = 4096
"""Tokens of a packed row in the trial, at most."""


@dataclass(frozen=True)
class Places:
    """Where a tensor of a module's inputs or outputs has the tokens of a packed row, and its packed rows."""

    tokens: tuple[int, ...]
    packed_rows: bool
    """Its first dimension is that of the packed rows, or a multiple."""

    def of_row(self, tensor: torch.Tensor, at: int, count: int, start: int, size: int) -> torch.Tensor:
        """Return the part of a row: that of packed row `at` of `count`, from token `start` on."""
        if self.packed_rows:
            share = len(tensor) // count
            tensor = tensor.narrow(0, at * share, share)
        for dimension in self.tokens:
            tensor = tensor.narrow(dimension, start, size)
        return tensor


@dataclass(frozen=True)
class MixingModule:
    """A module that mixes rows, and the places of its tensors by their path in its arguments or its result."""

    path: str
    inputs: dict[str, Places]
    outputs: dict[str, Places]


@dataclass(frozen=True)
class PackedTrial:
    """The shape of a trial: as no dimension of the model has its sizes, they tell the tokens and the packed rows."""

    packed_rows: int
    tokens: int

    @classmethod
    def of(cls, model: Any, step: int) -> "PackedTrial":
        """Return the trial of a base model; `step`: what the number of tokens is a multiple of."""
        dimensions = _dimensions(model)
        tokens = next(size for size in range(2 * FIRST + 3, LONGEST) if not size % step and size not in dimensions)
        multiples = {size for size in PACKED_ROWS for each in dimensions if not each % size}
        return cls(next((size for size in PACKED_ROWS if size not in multiples), PACKED_ROWS[0]), tokens)

    def places(self, tensor: torch.Tensor) -> Places | None:
        """Return a tensor's places; None if it has no tokens of packed rows."""
        tokens = tuple(dimension for dimension, size in enumerate(tensor.shape) if size == self.tokens)
        batched = bool(tokens) and 0 not in tokens and tensor.shape[0] % self.packed_rows == 0
        return Places(tokens, batched) if tokens else None


def find(
    model: Any, trial: PackedTrial, forward: Callable[[], Any], agree: Callable[[list[bool]], list[bool]]
) -> list[MixingModule]:
    """Return the outermost modules inside a base model's layers that mix rows, in a forward pass of its trial.

    `forward` makes the pass of [packed rows, tokens], in evaluation mode and without gradients. In each packed row the
    first row has FIRST tokens, and the second is the same; the first row of packed row 1 differs from all others.
    `agree` returns for each module whether any rank has found it.
    """
    seen: dict[str, MixingModule] = {}
    mixing: set[str] = set()
    names = {module: path for path, module in model.named_modules() if _in_layer(path)}

    def hook(module: Any, arguments: Any, named: Any, output: Any) -> Any:
        inputs, outputs = _places((arguments, named), trial), _places(output, trial)
        given, result = _tensors((arguments, named)), _tensors(output)
        if not any(places.packed_rows for places in inputs.values()) or not _joinable(outputs):
            return None
        path = names[module]
        seen[path] = MixingModule(path, inputs, outputs)
        if any(_differs(given[key], places, trial) for key, places in inputs.items()):
            return None
        if not any(_differs(result[key], places, trial) for key, places in outputs.items()):
            return None
        mixing.add(path)
        # What follows is tried with a second row that is the same again.
        return tree_map(lambda value: _alike(value, trial), output)

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in names]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    flags = zip(names.values(), agree([path in mixing for path in names.values()]), strict=True)
    found = {path: seen[path] for path, flag in flags if flag}
    return [each for path, each in found.items() if not any(path.startswith(f"{other}.") for other in found)]


def compute_row_by_row(model: Any, modules: list[MixingModule]) -> None:
    """Call these modules of a base model once for each row of a packed row from now on."""
    by_path = dict(model.named_modules())
    for each in modules:
        module = by_path[each.path]
        # Under torch.compile as attention row by row: each row length would be a graph of its own.
        module.forward = torch.compiler.disable(functools.partial(_by_row, module.forward, each))


def _by_row(own: Callable[..., Any], module: MixingModule, *arguments: Any, **named: Any) -> Any:
    rows = lengths.of_rows
    if rows is None or not lengths.packed or all(len(row) == 1 for row in rows):
        return own(*arguments, **named)
    pairs, spec = tree_flatten_with_path((arguments, named))
    keys, values = [keystr(path) for path, _ in pairs], [value for _, value in pairs]
    _check_known(module, dict(zip(keys, values, strict=True)), sum(rows[0]))
    results = []
    for number, row in enumerate(rows):
        pieces, start = [], 0
        for size in row:
            of_row = [
                module.inputs[key].of_row(value, number, len(rows), start, size)
                if isinstance(value, torch.Tensor) and key in module.inputs
                else value
                for key, value in zip(keys, values, strict=True)
            ]
            own_arguments, own_named = tree_unflatten(of_row, spec)
            with lengths.of_one_row():
                pieces.append(own(*own_arguments, **own_named))
            start += size
        results.append(_joined(pieces, lambda places: places.tokens[0], module))
    return _joined(results, lambda _: 0, module)


def _joined(parts: list[Any], dimension: Callable[[Places], int], module: MixingModule) -> Any:
    """Join the results of calls, each tensor along the dimension of its places. Of what has none, as a state after the
    last token, or has the tokens twice, as the weights of an attention, there is nothing: training reads neither."""
    if len(parts) == 1:
        return parts[0]
    (first, spec), *others = [tree_flatten_with_path(part) for part in parts]
    columns = zip(*([value for _, value in pairs] for pairs, _ in ((first, spec), *others)), strict=True)
    joined: list[Any] = []
    for (path, value), column in zip(first, columns, strict=True):
        places = module.outputs.get(keystr(path))
        if not isinstance(value, torch.Tensor):
            joined.append(value)
        else:
            joined.append(torch.cat(column, dimension(places)) if places and len(places.tokens) == 1 else None)
    return tree_unflatten(joined, spec)


def _check_known(module: MixingModule, values: dict[str, Any], tokens: int) -> None:
    """Raise UserError for a tensor that has other dimensions than in the trial, or none there."""
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        places = module.inputs.get(key)
        fits = all(value.shape[each] == tokens for each in places.tokens) if places else tokens not in value.shape
        if not fits:
            raise UserError(
                f"{module.path} mixes the rows of a packed row, and its input {key} of {list(value.shape)} cannot be "
                "divided into rows; set pack.packing: off"
            )


def _dimensions(model: Any) -> set[int]:
    """Return the sizes that tensors of a model may have: of its parameters, and the numbers of its config."""
    sizes = {size for each in model.parameters() for size in getattr(each, "ds_shape", each.shape)}
    waiting: list[Any] = [model.config.to_dict()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int):
            sizes.add(int(value))
    return sizes - {0, 1}


def _in_layer(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def _tensors(tree: Any) -> dict[str, torch.Tensor]:
    pairs, _ = tree_flatten_with_path(tree)
    return {keystr(path): value for path, value in pairs if isinstance(value, torch.Tensor)}


def _places(tree: Any, trial: PackedTrial) -> dict[str, Places]:
    return {key: places for key, value in _tensors(tree).items() if (places := trial.places(value))}


def _joinable(places: dict[str, Places]) -> bool:
    """Return whether the results of rows can be joined: one has their tokens once."""
    return any(len(each.tokens) == 1 for each in places.values())


def _second_rows(tensor: torch.Tensor, places: Places, trial: PackedTrial, at: int) -> torch.Tensor:
    return places.of_row(tensor, at, trial.packed_rows, FIRST, trial.tokens - FIRST)


def _differs(tensor: torch.Tensor, places: Places, trial: PackedTrial) -> bool:
    """Return whether the second row of packed row 1 differs from that of packed row 0, by more than those of packed
    rows 0 and 2: a kernel may sum in another order each time."""
    if not places.packed_rows:
        return False
    one, other, again = (_second_rows(tensor, places, trial, at) for at in range(3))
    if not one.numel():
        return False
    if not tensor.is_floating_point():
        return not torch.equal(one, other)
    noise, change = ((one.float() - each.float()).abs().nan_to_num().max().item() for each in (again, other))
    return change > 4 * noise


def _alike(value: Any, trial: PackedTrial) -> Any:
    """Return a tensor with the second row of packed row 0 in packed row 1 too."""
    places = trial.places(value) if isinstance(value, torch.Tensor) else None
    if places is None or not places.packed_rows:
        return value
    value = value.clone()
    _second_rows(value, places, trial, 1).copy_(_second_rows(value, places, trial, 0))
    return value
