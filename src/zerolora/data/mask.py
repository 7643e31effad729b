"""Verifies the loss mask: counts while rows are written, and checks before they are published."""

import collections
from typing import Any

import numpy as np

from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import UserError


class Proof:
    """The loss mask of all rows, counted from the written columns instead of the code that made them."""

    def __init__(self) -> None:
        self.roles: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.stops: collections.Counter[str] = collections.Counter()
        self.rows: collections.Counter[str] = collections.Counter()

    def add(self, counts: dict[str, int]) -> None:
        """Count a chunk's turns, supervised turns and tokens by role, and stop tokens, as tokenize counted them."""
        for name, number in counts.items():
            what, _, which = name.partition(".")
            if what == "stop":
                self.stops[which] += number
            elif what not in ("rows", "column"):
                self.roles[which][what] += number

    def look(self, batch: Any) -> None:
        """Count written rows (an Arrow record batch)."""
        ids, labels = (batch[name].flatten().to_numpy() for name in ("input_ids", "labels"))
        lengths = np.diff(batch["input_ids"].offsets.to_numpy())
        starts = np.cumsum(lengths) - lengths
        supervised = labels != IGNORED
        counts = np.add.reduceat(supervised, starts) if len(starts) else starts
        same = len(ids) == len(labels) and np.array_equal(lengths, np.diff(batch["labels"].offsets.to_numpy()))
        self.rows.update(
            rows=len(batch),
            tokens=len(ids),
            supervised_tokens=int(supervised.sum()),
            rows_without_supervised_token=int((counts == 0).sum()),
            rows_whose_first_token_is_supervised=int(supervised[starts].sum()),
            rows_with_wrong_counts=int(
                ((batch["length"].to_numpy() != lengths) | (batch["supervised"].to_numpy() != counts)).sum()
            ),
            labels_that_are_not_their_token=int((labels != ids)[supervised].sum()) if same else len(labels),
        )

    def check(self) -> None:
        """Raise UserError if the written rows violate a rule of the mask."""
        rules = [name for name in self.rows if name.startswith(("rows_", "labels_"))]
        broken = [f"{name.replace('_', ' ')}: {self.rows[name]}" for name in rules if self.rows[name]]
        if broken:
            raise UserError(f"the mask does not hold ({'; '.join(broken)}); nothing was published, please report it")

    def as_json(self) -> dict[str, Any]:
        """Return the content of mask.json."""
        return {
            **self.rows,
            "roles": {role: dict(sorted(counts.items())) for role, counts in sorted(self.roles.items())},
            "stop_tokens": dict(sorted(self.stops.items())),
        }
