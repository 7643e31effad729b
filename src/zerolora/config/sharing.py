"""Sharing between the runs of a grid or search: pack, estimate and render run once for runs with equal settings.

Only the keys of `over` decide which runs share, not their values, so that no output moves and nothing reruns when a
value is added or the config changes elsewhere.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zerolora.config.method_sections import MethodSections

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
            *("activation_checkpointing", "activation_offload", "validation_steps", "keep", "keep_checkpoints"),
            *("method", "objective", "optimizer"),
            *MethodSections.model_fields,
        )
    ),
)
"""Those that `estimate` or its inputs depend on."""
RENDER = (
    *ESTIMATE,
    *("render", "export"),
    *(f"train.{key}" for key in ("gradient_clipping", "canary", "epochs", "max_steps", "from_adapter")),
)
"""Those that `render` or its inputs depend on."""


class Shared(NamedTuple):
    """Names in results/ of the outputs that a run shares; its own name if it shares none."""

    packed: str
    estimated: str
    rendered: str


LONGEST = 100  # characters of a directory name
STAGES = Shared("pack", "estimate", "render")
"""The stage that writes each output."""
READ = (PACK, ESTIMATE, RENDER)


def names(owner: str, run: str, parts: Mapping[str, str | None]) -> Shared:
    """Return the names for a run of the grid or search `owner`.

    parts: the part of a name for each value of `over` by key; None for a value without a name.
    """
    result = []
    for read in READ:
        touched = [parts[key] for key in sorted(parts) if _touches(key, read)]
        name = "-".join([owner, *filter(None, touched)])
        result.append(name if None not in touched and len(name) <= LONGEST else run)
    return Shared(*result)


def _touches(key: str, read: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in read)
