"""Expands a grid of values to named runs.

A run is named by its grid and values only, e.g. `sweep-zero1-r8`, so that it keeps its name, and its results, when
values are added or reordered.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from zerolora.errors import shown

MOST_RUNS = 10_000
"""Limit for one grid, expanded within a second."""
Values = Sequence[Any] | Mapping[str, Any]
"""The values of a key: a list, or a mapping of names to values."""
Mistake = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class Combination:
    """One run of a grid."""

    name: str
    """Name of the run."""
    values: dict[str, Any]
    """Values by dotted key."""
    parts: dict[str, str]
    """Part of the name for each value, by dotted key."""


def combinations(grid: str, over: Mapping[str, Values]) -> list[Combination]:
    """Return each combination of the values, with keys in alphabetical order. `over` must have no `mistakes`."""
    named = [[(part, key, value) for part, value in _named(key, over)] for key in sorted(over)]
    return [
        Combination(
            "-".join([grid, *(part for part, _, _ in chosen)]),
            {key: value for _, key, value in chosen},
            {key: part for part, key, _ in chosen},
        )
        for chosen in itertools.product(*named)
    ]


def mistakes(over: Mapping[str, Values]) -> list[Mistake]:
    """Return (location in `over`, message) for values without a name, for equal names, and for too many runs."""
    result: list[Mistake] = []
    for key, values in over.items():
        for other in over:
            if other.startswith(f"{key}."):
                result.append(((other,), f"is part of {key}, which has values of its own; write one of the two"))
        nameless = [] if isinstance(values, Mapping) else [each for each in values if not _names_itself(each)]
        if nameless:
            text = "gives no short name to a run; write a mapping of names to values, as in {first: ..., second: ...}"
            result.append(((key,), f"{shown(nameless[0])} {text}"))
            continue
        parts: dict[str, Any] = {}
        for part, value in _named(key, over):
            if part in parts and value == parts[part]:
                result.append(((key,), f"{shown(value)} is there twice; write it once"))
            elif part in parts:
                text = f"are both called {part} in a run's name; write a mapping of names to values"
                result.append(((key,), f"{shown(parts[part])} and {shown(value)} {text}"))
            parts.setdefault(part, value)
    count = math.prod(len(values) for values in over.values())
    if count > MOST_RUNS:
        result.append(((), f"{count:,} runs; write values for at most {MOST_RUNS:,}"))
    return result


def repeated(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"train.lora.r": 8} as {"train": {"lora": {"r": 8}}}."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = result
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    return result


def _named(key: str, over: Mapping[str, Values]) -> list[tuple[str, Any]]:
    values = over[key]
    if isinstance(values, Mapping):
        return list(values.items())
    return [(_part(_label(key, over), value), value) for value in values]


def part_of(key: str, value: Any) -> str | None:
    """Return the part of a name for a value, independent of other keys and values; None if the value has no name."""
    return _part(key.replace(".", "_"), value) if _names_itself(value) else None


def _names_itself(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return any(map(str.isalnum, value)) if isinstance(value, str) else value is None or isinstance(value, int)


def _label(key: str, over: Mapping[str, Values]) -> str:
    """Return the last part of a dotted key, or the whole key if another one ends in the same part."""
    last = key.rpartition(".")[2]
    alone = sum(other.rpartition(".")[2] == last for other in over) == 1
    return last if alone else key.replace(".", "_")


def _part(label: str, value: Any) -> str:
    """Return the part of a run's name for a value: letters, digits and _ only, so that different parts, joined by -,
    give different names."""
    if isinstance(value, str):
        return "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in value.lower())
    if value is None:
        return f"{label}_none"
    if isinstance(value, bool):
        return f"{label}_{str(value).lower()}"
    # Without an exponent, as in learning_rate0_0002, since 2e-4 contains a -; 8 and 8.0 are equal.
    digits = format(Decimal(repr(value)), "f")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return label + digits.replace("-", "minus").replace(".", "_")
