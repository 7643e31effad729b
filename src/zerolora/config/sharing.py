"""What the runs of a grid or search share: pack, estimate and render run once for all that are equal in what they read.

Which runs those are is told by the keys of `over` alone, whatever their values: so nothing moves, and nothing runs
again, when a value is added or the config changes elsewhere.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zerolora.config.method_sections import MethodSections

PACK = ("dataset", "pack")
"""Keys, or sections, that `pack` reads."""
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
"""Those that `estimate` reads, or what it depends on."""
RENDER = (
    *ESTIMATE,
    *("render", "export"),
    *(f"train.{key}" for key in ("gradient_clipping", "canary", "epochs", "max_steps", "from_adapter")),
)
"""Those that `render` reads, or what it depends on."""


class Shared(NamedTuple):
    """The names, in results/, under which what a run shares with others is kept: a run's own if it shares nothing."""

    packed: str
    estimated: str
    rendered: str


LONGEST = 100
"""Characters of a name, which a folder has."""
STAGES = Shared("pack", "estimate", "render")
"""The stage of each."""
READ = (PACK, ESTIMATE, RENDER)


def names(owner: str, run: str, parts: Mapping[str, str | None]) -> Shared:
    """Return the names for a run of the grid or search `owner`.

    parts: by the key of each of the run's own values, what a name has of it; None if it has none.
    """
    found = []
    for read in READ:
        touched = [parts[key] for key in sorted(parts) if _touches(key, read)]
        name = "-".join([owner, *filter(None, touched)])
        found.append(name if None not in touched and len(name) <= LONGEST else run)
    return Shared(*found)


def _touches(key: str, read: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") or each.startswith(f"{key}.") for each in read)
