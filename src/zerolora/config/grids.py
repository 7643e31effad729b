"""Expands a grid of values to named runs, and names the outputs that runs share.

A run is named by its grid and values only, e.g. `sweep-zero1-r8`, so that it keeps its name, and its results, when
values are added or reordered. pack, estimate and render run once for all runs of a grid or search with equal settings.
Only the keys of `over` decide which runs share, not their values, so that no output moves and nothing reruns when a
value is added or the config changes elsewhere.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from zerolora.config.method_sections import MethodSections
from zerolora.errors import shown
from zerolora.registries import entries

MOST_RUNS = 10_000
"""Limit for one grid, expanded within a second."""
SEED = "train.seed"
"""The key that alone differs between repeated runs."""
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


def mistakes(over: Mapping[str, Values], repeats: int = 1) -> list[Mistake]:
    """Return (location in `over`, message) for values without a name, for equal names, for too many runs, and for seeds
    of a grid whose runs are repeated with seeds."""
    result: list[Mistake] = []
    for key, values in over.items():
        for other in over:
            if other.startswith(f"{key}."):
                result.append(((other,), f"is part of {key}, which also has values; keep one of the two"))
        nameless = [] if isinstance(values, Mapping) else [each for each in values if not _names_itself(each)]
        if nameless:
            text = "has no short name for a run; use a mapping of names to values, e.g. {first: ..., second: ...}"
            result.append(((key,), f"{shown(nameless[0])} {text}"))
            continue
        parts: dict[str, Any] = {}
        for part, value in _named(key, over):
            if part in parts and value == parts[part]:
                result.append(((key,), f"{shown(value)} occurs twice; list it once"))
            elif part in parts:
                text = f"are both called {part} in a run's name; use a mapping of names to values"
                result.append(((key,), f"{shown(parts[part])} and {shown(value)} {text}"))
            parts.setdefault(part, value)
    if repeats > 1 and SEED in over:
        result.append(((SEED,), "has values, and repeats trains each run with several seeds too; keep one of the two"))
    count = repeats * math.prod(len(values) for values in over.values())
    if count > MOST_RUNS:
        result.append(((), f"{count:,} runs; give values for at most {MOST_RUNS:,}"))
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


PACK = ("dataset", "pack")
"""Keys, or whole sections, that `pack` reads."""
ESTIMATE = (
    *PACK,
    "hardware",
    "estimate",
    *(
        f"train.{key}"
        for key in (
            *("nodes", "ranks_per_node", "global_batch", "micro_batch", "sequence_parallel", "precision", "attention"),
            *("kernels", "compile"),
            *("activation_checkpointing", "activation_offload", "validation_steps", "keep", "keep_checkpoints"),
            *("method", "objective", "optimizer"),
            *MethodSections.model_fields,
        )
    ),
)
"""Those that `estimate` or its inputs depend on, besides the costly keys of objectives."""
RENDER = (
    *ESTIMATE,
    *("render", "export", "merge.enabled"),
    *(f"train.{key}" for key in ("gradient_clipping", "canary", "epochs", "max_steps", "from_adapter", "tracker")),
)
"""Those that `render` or its inputs depend on."""


REFERENCE = (
    *("dataset", "hardware.device", "hardware.gpu", "hardware.compute_capability"),
    *(f"train.{key}" for key in ("method", "quantization", "precision", "from_adapter")),
    *(f"train.{objective}.reference" for objective in ("dpo", "ipo", "kto")),
)
"""Those that `reference` or its inputs depend on."""


TEACHER = (
    *("dataset", "hardware.device", "hardware.gpu", "hardware.compute_capability", "train.precision"),
    *(f"train.distill.{key}" for key in ("teacher", "adapter", "top_k", "temperature")),
)
"""Those that `teacher` or its inputs depend on."""


class Shared(NamedTuple):
    """Names in results/ of the outputs that a run shares; its own name if it shares none."""

    packed: str
    estimated: str
    rendered: str
    referenced: str
    taught: str


def unshared(name: str) -> Shared:
    """Return the names for a run that shares its outputs with its repeats alone."""
    return Shared(name, name, name, name, name)


LONGEST = 100  # characters of a directory name
SHARED_STAGES = Shared("pack", "estimate", "render", "reference", "teacher")
"""The stage that writes each output."""


def shared_names(owner: str, run: str, parts: Mapping[str, str | None]) -> Shared:
    """Return the names for a run of the grid or search `owner`.

    parts: the part of a name for each value of `over` by key; None for a value without a name.
    """
    costly = [f"train.{each.name}.{key}" for each in entries("objectives").values() for key in each.costly]
    result = []
    for read in (PACK, (*ESTIMATE, *costly), (*RENDER, *costly), REFERENCE, TEACHER):
        touched = [parts[key] for key in sorted(parts) if _touches(key, read)]
        name = "-".join([owner, *filter(None, touched)])
        result.append(name if None not in touched and len(name) <= LONGEST else run)
    return Shared(*result)


def _touches(key: str, read: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in read)
