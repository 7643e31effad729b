"""The tracker of a run."""

from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import (
    NO_EFFECT,
    Draft,
    NoEqual,
    Remark,
    Rule,
    idle,
    texts,
    unless_off,
)

TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard")
OFFLINE = idle("the tracker writes offline to the run's directory (docs/telemetry.md)")


def report(value: Any, draft: Draft) -> str | None:
    """Set the tracker from transformers' `report_to`, which may list several."""
    chosen = [each for each in texts(value) if each != "none"]
    if not chosen:
        return None
    known = [each for each in chosen if each in TRACKERS]
    if not known:
        raise NoEqual(f"{shown(value)} is not a tracker of docs/telemetry.md", NO_EFFECT)
    draft.set("train.tracker", known[0])
    several = f"; only {known[0]} of {', '.join(chosen)}" if len(chosen) > 1 else ""
    return Remark(f"the tracker writes offline{several}", NO_EFFECT)


def tracked(name: str) -> Rule:
    """Return the rule of a key that enables a tracker."""

    def translate(value: Any, draft: Draft) -> str | None:
        draft.set("train.tracker", name)
        return Remark(OFFLINE.remark, NO_EFFECT)

    return unless_off(Rule("train.tracker", translate, f"→ {name}, offline", NO_EFFECT))
