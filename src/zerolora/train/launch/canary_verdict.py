"""The verdict of a canary that passed, in the user's cache: by machine, versions and setting.

    $XDG_CACHE_HOME/zerolora/canary/<key>.json

A run of other rows, rates or seed under the same setting need not repeat it. A canary that failed leaves none.
"""

import contextlib
import datetime
import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from zerolora.config.compared import compared
from zerolora.config.fingerprint import fingerprints
from zerolora.config.settings import TrainSettings
from zerolora.errors import UserError
from zerolora.files import canonical, read_json, read_object, write_json
from zerolora.machine import identity
from zerolora.planner.zero_json import ZeroJson

FREE = frozenset(
    {
        *("learning_rate", "schedule", "schedule_options", "warmup_ratio", "warmup_steps", "weight_decay", "seed"),
        *("epochs", "max_steps", "validation_steps", "patience", "stop_above", "keep", "from_adapter"),
        *("checkpoint_steps", "checkpoint_minutes", "resume", "tracker"),
    }
)
"""Settings that choose no code which computes, communicates or moves: they are not part of the key."""
PACKING = ("packing", "capacity", "longest_packed_row")
"""Of the packing's statistics, those that decide the shapes of batches."""
Record = dict[str, Any]


class Verdict:
    """The place of a canary's verdict."""

    def __init__(self, settings: TrainSettings, zero: ZeroJson, paths: dict[str, Path]) -> None:
        """`paths`: as in canary.py, compare_first_steps."""
        relevant = {key: value for key, value in compared(settings).items() if key not in FREE}
        stats = read_json(paths["packing"] / "stats.json", "zerolora stage pack")
        self.setting: Record = {
            "settings": relevant,
            "zero": zero.as_json(),
            "weights": read_json(paths["weights"], "zerolora weights")["files"],
            "packing": {name: stats[name] for name in PACKING},
        }
        self.machine = identity.hardware(settings.device)
        self.versions = {"zerolora's code": fingerprints(["train"])["train"], **identity.versions()}
        key = {"machine": self.machine, "versions": self.versions, "setting": self.setting}
        self.path = _folder() / f"{hashlib.sha256(canonical(key).encode()).hexdigest()[:32]}.json"

    def read(self) -> "Passed | None":
        """Return the cached record; None if there is none, or it is damaged."""
        try:
            return Passed.model_validate(read_object(self.path, "zerolora stage train"))
        except (UserError, ValidationError, OSError):
            return None

    def write(self, record: Record) -> None:
        """Cache the record of a canary that has passed; without a writable cache the next run repeats it."""
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        with contextlib.suppress(OSError):
            write_json(self.path, {**record, "date": date, "machine": self.machine, "versions": self.versions})


class Curve(BaseModel):
    """The figures of a training's steps."""

    loss: list[float]
    gradient_norm: list[float]


class Curves(BaseModel):
    """The two trainings of a canary."""

    risky: Curve
    safe: Curve


class Passed(BaseModel):
    """The part of a cached record that is read."""

    date: str
    curves: Curves

    @property
    def risky(self) -> dict[str, list[float]]:
        """The curve of the run's own setting."""
        return self.curves.risky.model_dump()

    @property
    def safe(self) -> dict[str, list[float]]:
        """The curve of the safe setting."""
        return self.curves.safe.model_dump()


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "zerolora/canary"
