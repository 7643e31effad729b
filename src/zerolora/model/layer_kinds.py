"""Kinds of layers of a built model, and the model with one layer of each, which shows in less time what all show."""

import copy
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from zerolora.model.architecture import other_parts
from zerolora.model.families.keys import LAYERS


def stack_of(model: Any) -> str:
    """Return the path of the language model's list of layers, the largest if there are several; empty without one."""
    outside = tuple(f"{part}." for part in other_parts(model))
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        inside = tuple(f"{each}." for each in sizes)
        if isinstance(module, torch.nn.ModuleList) and not f"{path}.".startswith((*outside, *inside)):
            sizes[path] = sum(each.numel() for each in module.parameters())
    return max(sizes, key=lambda path: sizes[path], default="")


def kinds_of(model: Any, path: str) -> list[int]:
    """Return the kind of each layer of a model's stack.

    Layers are of a kind if they have the same classes and shapes, the same numbers, names, flags, functions and configs
    as attributes of their modules, beside their own number and schedules, and the same values in all lists with an
    entry for each layer, which a config may compute.
    """
    return _Layers(model, path).kinds


def keep_one_of_each_kind(model: Any, path: str, first_twice: bool = False) -> list[int]:
    """Remove all layers of a model's stack but the first of each kind, beside a copy of the very first if
    `first_twice`; they get the numbers of their new places. Return the kind of each layer that there were."""
    layers = _Layers(model, path)
    kept = [layers.kinds.index(kind) for kind in range(max(layers.kinds) + 1)]
    left = [layers.layers[number] for number in kept]
    if first_twice:
        kept, left = [0, *kept], [copy.deepcopy(layers.layers[0]), *left]
    layers.keep(kept, left)
    return layers.kinds


class _Layers:
    """The layers of a stack, and what the model knows of each."""

    def __init__(self, model: Any, path: str) -> None:
        self.parent, self.name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        self.layers = list(model.get_submodule(path))
        self.owners = _owners(model, self.layers)
        self.lists = [
            (owner, name, value)
            for owner in self.owners
            for name, value in (*vars(owner).items(), *_computed(owner))
            if isinstance(value, list | tuple) and len(value) == len(self.layers)
        ]
        configs: dict[int, str] = {}
        attributes = [_attributes(layer, configs) for layer in self.layers]
        self.first = _numbers(attributes)
        self.schedules = _schedules(attributes)
        known: dict[Any, int] = {}
        self.kinds = [
            known.setdefault(self._signature(number, each), len(known)) for number, each in enumerate(attributes)
        ]

    def _signature(self, number: int, attributes: dict[tuple[str, str], Any]) -> Any:
        layer = self.layers[number]
        own = {
            place: None if place[1] in self.first or place in self.schedules else value
            for place, value in attributes.items()
        }
        return (
            tuple((path, type(module).__qualname__) for path, module in layer.named_modules()),
            tuple((name, tuple(each.shape)) for name, each in (*layer.named_parameters(), *layer.named_buffers())),
            repr(own),
            tuple(repr(value[number]) for _, _, value in self.lists),
        )

    def keep(self, kept: list[int], left: list[Any]) -> None:
        """Let the stack have the layers `left`, whose entries in lists are those of the layers of numbers `kept`."""
        for owner, name, value in self.lists:
            entries = type(value)(value[number] for number in kept)
            if name in vars(owner):
                vars(owner)[name] = entries
            else:  # a property, which would compute those of a model with fewer layers
                owner.__class__ = type(type(owner).__name__, (type(owner),), {name: entries})
        for owner in self.owners:
            for name in LAYERS:
                if vars(owner).get(name) == len(self.layers):
                    vars(owner)[name] = len(kept)
        for number, layer in enumerate(left):
            for module in layer.modules():
                vars(module).update({name: self.first[name] + number for name in self.first.keys() & vars(module)})
        setattr(self.parent, self.name, torch.nn.ModuleList(left))


def _numbers(attributes: list[dict[tuple[str, str], Any]]) -> dict[str, int]:
    """Return the names of attributes that are a layer's own number wherever a layer has them, as layer_idx, with that
    of the first."""
    found: dict[str, set[Any]] = {}
    holders: dict[str, set[int]] = {}
    for number, each in enumerate(attributes):
        for (_, name), value in each.items():
            found.setdefault(name, set()).add(value - number if type(value) is int else None)
            holders.setdefault(name, set()).add(number)
    return {
        name: first
        for name, (first, *others) in found.items()
        if first is not None and not others and len(holders[name]) > 1
    }


def _schedules(attributes: list[dict[tuple[str, str], Any]]) -> set[tuple[str, str]]:
    """Return the attributes, by module and name, whose number is another in each of three layers or more: such a number
    makes no kind, unless it is the 0.0 with which a layer leaves something out."""
    found: dict[tuple[str, str], list[Any]] = {}
    for each in attributes:
        for place, value in each.items():
            found.setdefault(place, []).append(value)
    return {
        place
        for place, values in found.items()
        if len(values) > 2
        and all(type(value) is int or (type(value) is float and value) for value in values)
        and len(set(values)) == len(values)
    }


def _attributes(layer: Any, configs: dict[int, str]) -> dict[tuple[str, str], Any]:
    """Return the attributes of a layer's modules that tell of how they compute, by module and name. `configs` has the
    content of those that are known, by their id."""
    result: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if hasattr(value, "to_json_string"):
                if id(value) not in configs:
                    configs[id(value)] = repr(sorted(vars(value).items()))
                result[path, name] = configs[id(value)]
            elif (plain := _plain(value)) is not _OTHER:
                result[path, name] = plain
    return result


_OTHER = object()


def _plain(value: Any) -> Any:
    """Return a value of which two that are equal compute the same, of a function its name; _OTHER without one."""
    if isinstance(value, bool | str | int | float | None):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value.__qualname__ if isinstance(value, types.FunctionType | types.MethodType | type) else _OTHER


def _computed(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a config's properties."""
    for kind in type(owner).__mro__ if hasattr(owner, "to_json_string") else ():
        for name in [name for name, value in vars(kind).items() if isinstance(value, property)]:
            with suppress(Exception):  # of any type, where another config has it
                yield name, getattr(owner, name)


def _owners(model: Any, layers: list[Any]) -> list[Any]:
    """Return the model's configs, and its modules outside the layers, which may have lists by layer."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    configs = {id(each): each for each in (getattr(module, "config", None) for module in model.modules()) if each}
    for each in list(configs.values()):
        for name in getattr(each, "sub_configs", ()):
            part = getattr(each, name, None)
            if part is not None:
                configs[id(part)] = part
    return [*configs.values(), *(module for module in model.modules() if id(module) not in inside)]
