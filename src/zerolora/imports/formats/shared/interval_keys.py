"""How long training is, and its intervals: epochs, steps, warm-up, validations and checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

from zerolora.errors import shown
from zerolora.imports.formats.import_format import CHANGES, NO_EFFECT, Draft, NoEqual, Remark, Rule, flag, number, whole


def epochs(value: Any, draft: Draft) -> str | None:
    """Set train.epochs."""
    count = number(value)
    if not 0 < count < 2**31:
        raise NoEqual(f"{shown(value)} is not a number of epochs")
    draft.set("train.epochs", int(count) if count == int(count) else count)
    return None


def steps(path: str, share: bool = False) -> Rule:
    """Return the rule for a number of steps, or also for a share of all steps; -1 means none."""
    group = CHANGES if path == "train.max_steps" else NO_EFFECT

    def translate(value: Any, draft: Draft) -> str | None:
        if value == -1:  # transformers' value for none
            return None
        is_share = share and isinstance(value, float) and 0 < value < 1
        try:
            draft.set(path, value if is_share else whole(value))
        except NoEqual:
            raise NoEqual(f"{shown(value)} is not a number of steps, which {path} is", group) from None
        return None

    return Rule(path, translate)


def warmup(value: Any, draft: Draft) -> str | None:
    """Set the warm-up: a number of steps, or a fraction of all steps."""
    if isinstance(value, float) and 0 < value < 1:
        draft.facts["warmup_share"] = value
    else:
        draft.set("train.warmup_steps", int(value) if isinstance(value, float) and value.is_integer() else value)
    return None


def warmup_of_steps(draft: Draft) -> list[str]:
    """Remove 0 warm-up steps if warmup_ratio is set, which transformers then uses; return a line."""
    train = draft.config["train"]
    if train.get("warmup_steps") != 0 or not train.get("warmup_ratio"):
        return []
    del train["warmup_steps"]
    draft.came_from.pop(("train", "warmup_steps"), None)
    return [Remark("warmup_steps: 0 left out, since warmup_ratio overrides it there", NO_EFFECT)]


def evaluated(value: Any, draft: Draft) -> str | None:
    """Note when transformers validates: never, by steps or after each epoch."""
    draft.facts["evaluates"] = value not in ("no", False)
    if value in ("epoch", "no", False):
        draft.facts["evaluations"] = 1 if value == "epoch" else 0
    elif value != "steps":
        raise NoEqual(f"{shown(value)} is not a strategy of evaluation; set train.validation_steps", NO_EFFECT)
    return None


def best(value: Any, draft: Draft) -> str | None:
    """Note whether the best adapter is published instead of the last."""
    draft.facts["best"] = flag(value)
    return None


def evaluations(value: Any, draft: Draft) -> str | None:
    """Note the validations in each epoch."""
    draft.facts["evaluations"] = whole(value)
    return None


def saved(value: Any, draft: Draft) -> str | None:
    """Note whether transformers writes a checkpoint after each epoch."""
    if value == "best":
        raise NoEqual("checkpoints are written by time; train.keep: best publishes the best one", NO_EFFECT)
    if value != "epoch":
        raise NoEqual("checkpoints are written by time as well: train.checkpoint_minutes", NO_EFFECT)
    draft.facts["saves_by_strategy"] = 1
    return None


def kept(value: Any, draft: Draft) -> str | None:
    """Set the number of checkpoints that are kept; 0 and less means all in transformers."""
    if isinstance(value, bool) or not isinstance(value, int) or value > 0:
        draft.set("train.keep_checkpoints", whole(value))
    return None


def set_validation(draft: Draft) -> None:
    """Set train.validation_steps from the validations in an epoch, and train.keep if the best adapter is not wanted."""
    train, facts = draft.config.setdefault("train", {}), draft.facts
    count = facts.get("evaluations")
    draft.key = ""
    if count == 0:
        train.pop("validation_steps", None)
    elif share := _share(count, train):
        draft.set("train.validation_steps", share)
    if "validation_steps" in train and facts.get("best") is False:
        draft.set("train.keep", "last")


def set_checkpoints(draft: Draft) -> None:
    """Set train.checkpoint_steps from the checkpoints in an epoch, which override a number of steps there."""
    train, facts = draft.config.setdefault("train", {}), draft.facts
    draft.key = ""
    if count := facts.get("saves", facts.get("saves_by_strategy")):
        train.pop("checkpoint_steps", None)
        if share := _share(count, train):
            draft.set("train.checkpoint_steps", share)


def _share(count: int | None, train: Mapping[str, Any]) -> float | None:
    """Return an interval as a share of all steps, None for none before the end.

    It is rounded down, as the interval in steps is rounded up from it.
    """
    intervals = (count or 0) * train.get("epochs", 1)
    return math.floor(10**6 / intervals) / 10**6 if intervals > 1 else None
